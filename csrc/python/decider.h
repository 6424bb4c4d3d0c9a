// SPDX-License-Identifier: Apache-2.0
// Decides on the micro-batches of one model: which variant takes a pack, or why none does.
//
// Note [Deciding]
// In each micro-batch, eager or not, without waiting for the device. What is asked for first makes
// no variant: a pack that no graph of the model could take costs no look at the layers. What makes
// one beside the capacity and the form is whether gradients are recorded, and the state that the
// layers are in.
//
// Rotary positions begin anew in each document of a canonical pack. So packs run as given in which
// Megatron's unfused RoPE may go on from document to document.
//
// A variant's name is Python's own object. There are few, and each is made once: as the same
// object it is found in dictionaries without a comparison.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "csrc/decide/dispatch.h"
#include "csrc/python/pack_reader.h"

namespace megagraph {

class Decider {
 public:
  // `reasons`: Python's members of EagerReason, in order. `make_key`: makes the name of a variant
  // of a capacity, the four values of a form, gradients or not, a state, whether there is a mask,
  // and how many ranks share the pack. It must not lead back to this object: garbage collection
  // does not see what C++ holds.
  // `depend_on_longest`: the model's rotary tables have as many rows as a pack's longest document;
  // `are_cut`: it then cuts them to the rows of the pack.
  Decider(int64_t extra_seqs, bool depend_on_longest, bool are_cut, pybind11::list reasons,
          pybind11::object make_key);

  // By context-parallel size, Python's own; none while they are still to be learned.
  void set_capacities(const pybind11::dict& by_cp_size);
  // By context-parallel size, the process groups that a pack may name, a tuple of equal ones; none
  // where every pack is shared alike.
  void set_groups(pybind11::dict by_cp_size) { groups_ = std::move(by_cp_size); }
  // Why the model takes no graph at all; None for nothing.
  void refuse(pybind11::object reason) { refused_ = std::move(reason); }

  // Why no graph of the model could take a pack of `tokens` rows, whatever state the layers are in;
  // None where one could. `cp_size`: of packs that do not say their own.
  pybind11::object eager_reason(const pybind11::object& params, int64_t tokens, int64_t cp_size);

  // The name of the variant, whose capacity is None while capacities are still to be learned; or
  // the reason. `state_of_call`: numbers the state that the layers are in.
  pybind11::object decide(const pybind11::object& params, int64_t tokens, bool has_mask,
                          const pybind11::object& state_of_call, int64_t cp_size);

 private:
  struct Bank {
    std::vector<Capacity> capacities;
    pybind11::list objects;
  };
  // A pack that some graph may take, or the reason against it.
  struct Found {
    pybind11::object reason, capacity;
    PackShape shape;
    PackForm form;
  };

  pybind11::object reason(EagerReason why) const { return reasons_[static_cast<size_t>(why)]; }
  Found find(const pybind11::object& params, int64_t tokens, int64_t cp_size);
  bool may_positions_go_on(const PackShape& shape) const;
  std::optional<int64_t> known_cp_size(const pybind11::object& params, int64_t cp_size) const;

  const int64_t extra_seqs_;
  const bool depend_on_longest_, are_cut_;
  const pybind11::list reasons_;
  const pybind11::object make_key_;
  pybind11::object refused_ = pybind11::none();
  std::map<int64_t, Bank> banks_;
  pybind11::dict groups_;
  using Fields = std::tuple<PyObject*, bool, bool, PyObject*, bool, bool, int64_t, bool, int64_t>;
  std::map<Fields, pybind11::object> keys_;
};

}  // namespace megagraph
