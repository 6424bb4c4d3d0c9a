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
#include <optional>

#include "csrc/decide/dispatch.h"

namespace megagraph {

// Whether the `seq_idx` of a pack can be staged: int32 [1, tokens], where the offsets are.
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

// The context-parallel ranks that a pack names as its own, and how many; None and none where it
// leaves them to the model.
pybind11::object cp_group_of(const pybind11::handle& params);
std::optional<int64_t> local_cp_size(const pybind11::handle& params);
// Whether it names several.
bool has_own_cp_group(const pybind11::handle& params);

}  // namespace megagraph
