// SPDX-License-Identifier: Apache-2.0
// Picks the capacity for a pack, and learns capacities from packs of a warm-up, from plain numbers
// alone: ranks that see the same packs decide alike, since nothing else enters.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "csrc/decide/eager_reason.h"

namespace megagraph {

// What one captured variant can hold: physical tokens of one rank's share, documents, tokens of the
// longest one.
struct Capacity {
  int64_t tokens, num_seqs, max_seqlen;

  // In the order of their cost.
  auto values() const { return std::tie(tokens, num_seqs, max_seqlen); }
};

inline bool operator==(const Capacity& one, const Capacity& other) {
  return one.values() == other.values();
}
inline bool operator<(const Capacity& one, const Capacity& other) {
  return one.values() < other.values();
}

// What a pack needs, in the same dimensions, and the context-parallel ranks that share it.
struct PackShape {
  int64_t tokens, num_seqs, max_seqlen, cp_size = 1;

  auto values() const { return std::tie(tokens, num_seqs, max_seqlen, cp_size); }
  // What its documents may need; some hosts declare a constant, however short the pack.
  int64_t longest() const { return std::min(max_seqlen, tokens * cp_size); }
  // The first dimension that a capacity does not hold; none if it fits.
  std::optional<EagerReason> exceeds(const Capacity& capacity) const;
};

inline bool operator==(const PackShape& one, const PackShape& other) {
  return one.values() == other.values();
}
inline bool operator<(const PackShape& one, const PackShape& other) {
  return one.values() < other.values();
}

struct Decision {
  int capacity = -1;  // by index; -1 where none holds the pack
  EagerReason reason = EagerReason::kCpSizeNotCaptured;
};

// The cheapest capacity that holds the pack: fewest tokens, then fewest documents, then the
// shortest longest one. If none does, the reason is the first dimension in which it exceeds every
// capacity that held the ones before it.
Decision decide(const PackShape& shape, const std::vector<Capacity>& capacities);

// What packs need: the tokens of the largest one; documents, rounded up to a power of two, that
// most have room in; and that all have room in, likewise. Where packs vary the first and the last
// have headroom, for larger ones to come. Where ranks have seen different packs, the largest of
// each number serves all.
using Needs = std::array<int64_t, 3>;

// Of packs by how often each was met. Less the documents that the tail's convention adds to each;
// zeros for none. If packs are known to have at most `expected_tokens`, only larger ones that were
// met need more; 0 or 1 says nothing.
Needs needs_of(const std::map<PackShape, int64_t>& observed, int64_t extra_seqs,
               int64_t expected_tokens);

// Capacities that would have held every observed pack: one for most packs, one for the rest. The
// longest document is taken to be as long as a pack, which `cp_size` ranks share: a later one may
// be.
std::vector<Capacity> capacities_for(const Needs& needs, int64_t extra_seqs, int64_t cp_size);

}  // namespace megagraph
