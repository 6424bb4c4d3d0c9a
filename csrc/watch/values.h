// SPDX-License-Identifier: Apache-2.0
// Hashes values of Python's: by content where they are plain, by identity otherwise.
//
// Note [Values]
// By content: None, flags, numbers of any type, strings, enumerations, dtypes, devices, and tuples,
// lists, slices, sets and, in their order, dictionaries of values; dataclasses and namespaces (a
// model's configuration), attribute by attribute in any order, and objects whose slots are all that
// they have. By identity: modules, functions and other callables, classes, and every other
// object. A tensor is one object at one address, in one form; one of a few entries that stays on
// the host beside graphs on a device is its numbers besides, which calls read. Contents end at a
// depth of eight, and at 4,096 entries of one container; what is met again is hashed once.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <unordered_map>
#include <vector>

#include "csrc/watch/hash.h"

namespace megagraph {

class ValueHasher {
 public:
  // `reads_scalars`: the numbers in tensors on the host that hold few, too.
  explicit ValueHasher(bool reads_scalars = false) : reads_scalars_(reads_scalars) {}
  // `dicts` takes the dictionaries that are met, outer ones first, where each change of them is a
  // change of a dictionary: those inside of a list or a set are not. Among them are those of the
  // attributes of configurations, where changes can be told.
  ValueHasher(bool reads_scalars, std::vector<pybind11::object>& dicts)
      : reads_scalars_(reads_scalars), dicts_(&dicts) {}

  // Needs the GIL; throws with a Python error where a value's own hash does.
  size_t operator()(PyObject* value);

  // Whether a value was met since it was made whose content may change while the object stays: a
  // list, a set, a tensor, a configuration or a dictionary that was not taken.
  bool has_met_mutable() const { return has_met_mutable_; }

 private:
  size_t of_sequence(PyObject* sequence);
  size_t of_entries(PyObject* dict, bool in_order);
  size_t of_set(PyObject* set);
  size_t of_slots(PyObject* object, PyObject* fields);
  size_t of_members(PyObject* object);
  size_t of_tensor(PyObject* value);
  // Of what nobody can watch.
  void meet_mutable();

  struct Seen {
    pybind11::object value;
    int depth = 0;
    size_t hash = 0;
  };
  std::unordered_map<PyObject*, Seen> seen_;
  const bool reads_scalars_;
  std::vector<pybind11::object>* dicts_ = nullptr;
  bool has_met_mutable_ = false;
  int depth_ = 0;
};

// Mixes in where a tensor lies and what is read there. Memory that was freed counts as no address.
// Whether there is some, or none is needed.
bool mix_address(Hash& hash, const at::Tensor& tensor);

// None, a flag, number, text, enumeration or device.
bool is_plain(PyObject* value);

// A dataclass or a namespace, whose attributes are its content.
bool is_configuration(PyObject* object);

}  // namespace megagraph
