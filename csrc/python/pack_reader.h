// SPDX-License-Identifier: Apache-2.0
// Reads packs as they are given, without waiting for the device: in each micro-batch, eager or not.
//
// Note [Reading packs]
// A pack is anything with the fields of Megatron's `PackedSeqParams`. Its shape is what the host
// knows: rows of the input, entries of the offsets, and a `max_seqlen` that is a number or a tensor
// on the host. One that lives on the device, or is missing, may be a document of all tokens.
//
// Its form is what changes a graph beside the shape: variant_key.h. A pack whose queries and keys
// have offsets of their own, or longest documents of their own, has no form: to compare values
// would wait for the device, and tensors over the same entries are the same offsets. Nor has one
// that says anything but yes or no of padding between documents.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "csrc/decide/dispatch.h"
#include "csrc/decide/variant_key.h"

namespace megagraph {

// Whether the `seq_idx` of a pack can be staged: int32 [1, tokens], where the offsets are.
bool is_seq_idx_stageable(const pybind11::handle& params, int64_t tokens);

// Whether a pack is of samples of one length.
bool is_of_samples(const pybind11::handle& params);

// None if `params` describes no packed sequences. `extra_seqs`: documents that a tail convention
// adds.
std::optional<PackShape> pack_shape(const pybind11::handle& params, int64_t tokens,
                                    int64_t extra_seqs, int64_t cp_size);

// The tokens of its longest document, as far as the host knows them.
std::optional<int64_t> longest_document(const pybind11::handle& params);

// None of one whose offsets no op takes: int32 [N + 1], contiguous, on `device` if that
// is given.
std::optional<PackForm> pack_form(const pybind11::handle& params,
                                  std::optional<c10::Device> device);

// What staging reads of a pack of a form: offsets, padded ones, `seq_idx`, and if `cp_size` ranks
// share it, the offsets of this one's rows, which has a share of every document.
std::vector<at::Tensor> pack_sources(const pybind11::handle& params, const PackForm& form,
                                     int64_t cp_size);

// The context-parallel ranks that a pack names as its own, and how many; None and none where it
// leaves them to the model.
pybind11::object cp_group_of(const pybind11::handle& params);
std::optional<int64_t> local_cp_size(const pybind11::handle& params);
// Whether it names any, or another number than the `cp_size` of its model.
bool has_own_ranks(const pybind11::handle& params, int64_t cp_size);

}  // namespace megagraph
