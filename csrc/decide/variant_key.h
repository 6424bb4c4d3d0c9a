// SPDX-License-Identifier: Apache-2.0
// The name of a variant: what graphs were captured for.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "csrc/decide/dispatch.h"

namespace megagraph {

// What of a pack changes a graph beside its shape: which fields it carries.
struct PackForm {
  bool has_padded;  // padded offsets beside the actual ones
  // Its padded offsets are the actual ones, the same object, by which Transformer Engine knows that
  // there is no padding between documents.
  bool is_aliased;
  std::optional<bool> pad_between_seqs;
  bool has_seq_idx = false;

  auto values() const { return std::tie(has_padded, is_aliased, pad_between_seqs, has_seq_idx); }
};

struct VariantKey {
  std::optional<Capacity> capacity;  // none: of a micro-batch that may be padded to any
  PackForm form;
  bool grad;  // gradients are recorded
  int64_t state = 0;
  bool has_mask = false;  // layers are given a padding mask of the user's
  int64_t cp_size = 1;    // ranks that share the pack
  bool by_token = false;  // rotary frequencies have a row for each token, and are staged

  // What is captured together: the same for every capacity.
  VariantKey kind() const { return of_capacity(std::nullopt); }
  // What kinds have in common that differ in their state alone.
  VariantKey family() const { return kind().in_state(0); }
  VariantKey of_capacity(std::optional<Capacity> other) const {
    VariantKey key = *this;
    key.capacity = other;
    return key;
  }
  VariantKey in_state(int64_t other) const {
    VariantKey key = *this;
    key.state = other;
    return key;
  }

  auto values() const {
    return std::make_tuple(capacity, form.values(), grad, state, has_mask, cp_size, by_token);
  }
};

inline bool operator==(const PackForm& one, const PackForm& other) {
  return one.values() == other.values();
}
inline bool operator<(const PackForm& one, const PackForm& other) {
  return one.values() < other.values();
}
inline bool operator==(const VariantKey& one, const VariantKey& other) {
  return one.values() == other.values();
}
inline bool operator<(const VariantKey& one, const VariantKey& other) {
  return one.values() < other.values();
}

}  // namespace megagraph
