// SPDX-License-Identifier: Apache-2.0
// Makes packs: the canonical ones of a variant, and others that stand for a pack as it was given.
//
// A canonical pack is of the class that the given one is of, whatever fields that has in a release.
// What others have set on the given one beside these is handed on.
//
// Its offsets are marked where they are nobody else's: by the mark RoPE inside of a layer knows
// that positions begin anew in each document, or that its frequencies have a row for each token
// (megagraph/megatron/graphs/layer_arguments.py, Note [Where positions begin]).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "csrc/decide/variant_key.h"

namespace megagraph {

// Whether others of the pack's class can be made of offsets alone, and be told more afterwards, as
// of Megatron's: not of one with slots, or an `__init__` of its own that wants something else.
bool can_be_made(const pybind11::object& params);
// Marks the offsets of a pack, which nobody else holds.
void mark_canonical(const pybind11::object& params, bool by_token);
bool is_canonical(const pybind11::handle& offsets);
// Of a canonical pack.
bool is_by_token(const pybind11::handle& offsets);
// The pack with marked tensors of its own over the same offsets; equal ones stay one.
pybind11::object with_canonical_mark(const pybind11::object& params, bool by_token);
// The pack without the ranks that it names.
pybind11::object without_ranks(const pybind11::object& params);
// What a host has put on a pack, or its class has, beside Megatron's fields: no graph hears of it.
std::vector<pybind11::object> host_names(const pybind11::object& params);

// A document that names its ranks, as a pack of one; packs, and what names no ranks, as they are.
// Megatron's hybrid context parallelism gives one document at a time in 0.16: in the format of
// unpacked batches, with its length and the ranks that share it. They share its rows as those of a
// pack's documents, so that it is a pack of one, which layers that know packs alone can run, and
// graphs. `ids` are the model's tokens [B, T], not read where it takes `hidden_states` [T, B, H].
// Throws ValueError where it is not one document.
pybind11::object as_pack(const pybind11::object& params, const pybind11::object& ids,
                         const pybind11::object& hidden_states);

// A canonical pack of `rows`, of all ranks together, with one more document: of the rows past its
// end, and of no valid token.
pybind11::object with_tail_as_document(const pybind11::object& params, int64_t rows);

class CanonicalPacks {
 public:
  // `extra_seqs`: documents that the convention of the tail adds, of padding alone.
  CanonicalPacks(VariantKey key, int64_t extra_seqs);

  const VariantKey& key() const { return key_; }
  // The same as Python knows it, one object.
  const pybind11::object& python_key() const { return python_key_; }
  // What is put behind the actual and, if canonical packs have them, the padded offsets; none
  // repeats the last one.
  std::map<std::string, std::optional<int64_t>> added_offsets() const;
  // A pack of a class with these offsets, None for none; `seq_idx` is None in forms without it.
  pybind11::object make(const pybind11::object& params_type, const pybind11::object& actual,
                        const pybind11::object& padded, const pybind11::object& seq_idx);
  // The same of the class of a given pack, with whatever others have set on that.
  pybind11::object make_like(const pybind11::object& given, const pybind11::object& actual,
                             const pybind11::object& padded, const pybind11::object& seq_idx);

 private:
  // What each pack of a class says beside its offsets, less what the release does not have.
  const pybind11::dict& constants(const pybind11::object& params_type);

  const VariantKey key_;
  const int64_t extra_seqs_;
  const pybind11::object python_key_;
  std::map<PyObject*, std::pair<pybind11::object, pybind11::dict>> constants_;  // by class
};

}  // namespace megagraph
