// SPDX-License-Identifier: Apache-2.0
// Reads packs as they are given, without waiting for the device: in each micro-batch, eager or not.
//
// Note [Reading packs]
// A pack is anything with the fields of Megatron's `PackedSeqParams`. Its shape is what the host
// knows: rows of the input, entries of the offsets, and a `max_seqlen` that is a number or a tensor
// on the host. One that lives on the device, or is missing, may be a document of all tokens.
//
// Its form is what changes a graph beside the shape: whether it carries padded offsets, whether
// these are the actual ones (the same object, by which Transformer Engine knows that there is no
// padding), what it says of padding between documents, and whether it carries `seq_idx`, the
// document of each row. A pack whose queries and keys have offsets of their own, or longest
// documents of their own, has no form: to compare values would wait for the device, and tensors
// over the same entries are the same offsets.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "csrc/decide/dispatch.h"

namespace megagraph {

// Whether the `seq_idx` of a pack can be staged: int32, an entry for each of `tokens` rows, where
// the offsets are.
bool is_seq_idx_stageable(const pybind11::handle& params, int64_t tokens);

// None if `params` describes no packed sequences. `extra_seqs`: documents that a tail convention
// adds.
std::optional<PackShape> pack_shape(const pybind11::handle& params, int64_t tokens,
                                    int64_t extra_seqs, int64_t cp_size);

struct PackForm {
  bool has_padded, is_aliased;
  pybind11::object pad_between_seqs;
  bool has_seq_idx;
};

std::optional<PackForm> pack_form(const pybind11::handle& params);

// Whether a pack of several documents declares one as long as the pack. Waits for the device if
// `max_seqlen` lives there.
bool declares_every_row(const pybind11::handle& params, int64_t tokens);

// A pack that some graph may take.
struct GivenPack {
  pybind11::object params;
  PackShape shape;
  pybind11::object form;      // of `make_form`
  pybind11::object capacity;  // None while capacities are still to be learned
};

// Reads the packs of one model.
class PackReader {
 public:
  // `reasons`: Python's members of EagerReason, in order. `make_form`: makes what Python knows a
  // form by from its four values, which are few; its answers are kept.
  PackReader(int64_t extra_seqs, pybind11::list reasons, pybind11::object make_form);

  // By context-parallel size, Python's own; none while they are still to be learned.
  void set_capacities(const pybind11::dict& by_cp_size);
  // Why the model takes no graph at all; None for nothing.
  void refuse(pybind11::object reason) { refused_ = std::move(reason); }

  // A `GivenPack`, or a member of EagerReason: why no graph of the model can take it.
  pybind11::object read(const pybind11::object& params, int64_t tokens, int64_t cp_size);

 private:
  pybind11::object reason(EagerReason why) const;
  pybind11::object form_of(const PackForm& form);

  const int64_t extra_seqs_;
  const pybind11::list reasons_;
  const pybind11::object make_form_;
  pybind11::object refused_ = pybind11::none();
  struct Bank {
    std::vector<Capacity> capacities;
    pybind11::list objects;
  };
  std::map<int64_t, Bank> banks_;
  std::map<std::tuple<bool, bool, PyObject*, bool>, pybind11::object> forms_;
};

}  // namespace megagraph
