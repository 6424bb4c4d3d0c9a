// SPDX-License-Identifier: Apache-2.0
// Reads the values that make the state of one module, configuration or class: Note [State] in
// state_watch.h.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <string>
#include <vector>

namespace megagraph {

struct StateItem {
  pybind11::object name, value;  // the latter null where the hash is of no single value
  size_t hash;
  bool is_mutable = false;                // its content may change without a change of a dictionary
  bool is_configuration = false;          // has items of its own
  std::vector<pybind11::object> dicts{};  // inside of the value, outer ones first
};

using StateItems = std::vector<StateItem>;

struct StateTensor {
  PyObject *name, *tensor;  // borrowed
  size_t hash;              // of the name
};

using StateTensors = std::vector<StateTensor>;

struct StateRules {
  const pybind11::set& skipped;              // names of attributes
  const pybind11::object& is_expected_hook;  // whether somebody answers for a hook
  bool reads_scalars;                        // Note [Values] in values.h
};

StateItems items_of_module(const pybind11::object& module, const StateRules& rules);
StateItems items_of_configuration(const pybind11::object& configuration, const StateRules& rules);
// With those of the classes above it, less torch's Module, which is above all of them.
StateItems items_of_class(const pybind11::object& type, const StateRules& rules);
// Of the hooks on all modules.
StateItems items_of_global_hooks(const StateRules& rules);

// What the items depend on beside the owner's own dictionary. Borrowed.
std::vector<PyObject*> tables_of_module(PyObject* attributes);
// Its parameters and buffers; none without attributes.
StateTensors tensors_of_module(PyObject* attributes);
// The attributes of a module that hold its hooks.
const std::array<pybind11::str, 4>& hook_tables();
std::vector<PyObject*> global_hook_tables();
// The first hook of a module, or of all modules for None, that nobody answers for; else None.
pybind11::object foreign_hook(const pybind11::object& module,
                              const pybind11::object& is_expected_hook);

// Of an item of this name and hash, and in which order they come does not matter.
size_t summand(PyObject* name, size_t hash);
// A value in a few words, for people.
std::string describe(const StateItem& item);

}  // namespace megagraph
