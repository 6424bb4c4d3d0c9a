// SPDX-License-Identifier: Apache-2.0
// A hash of the Python state that captured modules run with.
//
// Note [State]
// A capture runs a module's Python once: whatever it read there is part of the graph. What it can
// read of the modules themselves is their state:
// - of each module the values in its attributes (Note [Values] in values.h), `training` and a
//   forward of its own among them, which submodules it has in which order, and its hooks, less
//   those that the caller answers for;
// - of the configurations that modules hold in attributes every attribute;
// - of each class of a module, and of the classes above it, the methods and plain values;
// - which parameters and buffers of each module require a gradient;
// - which list of layers their block has;
// - the hooks on all modules;
// - what functions of the caller return.
// Attributes that are left out by name are no part of it. What else torch keeps in attributes of
// its own, parameters and buffers among it, is compared elsewhere (module_watch.h).
//
// Nearly all of this stands in dictionaries, and one is read again only where it has changed
// (dict_events.h), or its class has. So most calls compare, and read no more than what requires a
// gradient. The content of lists and sets in attributes, and whatever lies inside of these, changes
// without a word, and so do an object's class and its dictionary for another one, configurations in
// values, fields in slots, a tensor's memory and form and a scalar on the host: they are read again
// where the whole state is asked for.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/watch/state_items.h"

namespace megagraph {

class StateWatch {
 public:
  // `modules`: weak references. `block`: one to the module in whose attribute `layers` they are, or
  // a dead one. `left_out`: names of attributes. `is_expected_hook`: whether the
  // caller answers for a hook. `device`: where graphs run.
  StateWatch(const pybind11::list& modules, pybind11::object block,
             const pybind11::iterable& left_out, pybind11::object is_expected_hook,
             at::Device device);
  ~StateWatch();
  StateWatch(const StateWatch&) = delete;
  StateWatch& operator=(const StateWatch&) = delete;

  // Functions of the caller: what they return is part of the state from now on.
  void set_keys(pybind11::list keys) { keys_ = std::move(keys); }
  // Which list the block has among its modules, and which layers are in it. None where something
  // stands before it.
  std::optional<size_t> layers() const;
  // The state of now. `whole`: the content of containers too, else as it was when last read.
  size_t now(bool whole);

  // Every value by itself: (index of the first module that has it, its name there, its hash, the
  // value in words). What belongs to no module has the index after the last one.
  pybind11::list items();

 private:
  struct Owner;
  struct Flag {
    PyObject* tensor;  // borrowed from its owner
    bool is_trained;   // at the last look
  };
  class Followed;
  using Owners = std::vector<std::unique_ptr<Owner>>;

  void look_at_objects();
  void refresh();
  void follow_classes();
  void follow_configurations();
  void read_containers();
  void combine();
  size_t which_are_trained();
  PyObject* list_of_layers() const;
  size_t of_keys() const;
  StateRules rules() const { return {skipped_, is_expected_hook_, reads_scalars_}; }

  pybind11::list keys_;
  const pybind11::object block_, is_expected_hook_;
  const bool reads_scalars_;
  pybind11::set skipped_;  // names of attributes
  Owners owners_, configurations_, classes_;
  uint64_t seen_ = 0;  // how many events there were at the last look
  bool is_read_ = false;
  size_t hash_ = 0;
  std::vector<Flag> tensors_;      // of all owners
  std::optional<size_t> trained_;  // a hash of which of them are
};

}  // namespace megagraph
