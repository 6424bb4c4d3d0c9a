// SPDX-License-Identifier: Apache-2.0
#include "csrc/decide/dispatch.h"

#include <algorithm>

#include "csrc/decide/require.h"

namespace megagraph {
namespace {

int64_t power_of_two(int64_t at_least) {
  int64_t power = 1;
  while (power < at_least) power *= 2;
  return power;
}

}  // namespace

std::optional<EagerReason> PackShape::exceeds(const Capacity& capacity) const {
  if (tokens > capacity.tokens) return EagerReason::kTooManyTokens;
  if (num_seqs > capacity.num_seqs) return EagerReason::kTooManySequences;
  if (max_seqlen > capacity.max_seqlen) return EagerReason::kSequenceTooLong;
  return std::nullopt;
}

Decision decide(const PackShape& shape, const std::vector<Capacity>& capacities) {
  Decision found;
  std::optional<EagerReason> why;
  for (size_t i = 0; i < capacities.size(); ++i) {
    const auto exceeded = shape.exceeds(capacities[i]);
    if (!exceeded) {
      const bool is_cheaper = found.capacity < 0 || capacities[i] < capacities[found.capacity];
      if (is_cheaper) found.capacity = static_cast<int>(i);
    } else if (!why || *exceeded == EagerReason::kSequenceTooLong ||
               *why == EagerReason::kTooManyTokens) {
      why = exceeded;
    }
  }
  if (why) found.reason = *why;
  return found;
}

Needs needs_of(const std::vector<PackShape>& observed, int64_t extra_seqs) {
  if (observed.empty()) return {};
  int64_t tokens = 0;
  std::vector<int64_t> counts;
  for (const PackShape& shape : observed) {
    tokens = std::max(tokens, shape.tokens);
    counts.push_back(std::max<int64_t>(shape.num_seqs - extra_seqs, 1));
  }
  std::sort(counts.begin(), counts.end());
  return {tokens, power_of_two(counts[counts.size() / 2]), power_of_two(counts.back())};
}

std::vector<Capacity> capacities_for(const Needs& needs, int64_t extra_seqs, int64_t cp_size) {
  const auto [tokens, usual, most] = needs;
  require(tokens >= 1,
          "capacities are learned from packs that somebody has met, and there were none");
  std::vector<Capacity> found;
  for (const int64_t count : {usual, most}) {
    const Capacity capacity{tokens, count + extra_seqs, tokens * cp_size};
    if (found.empty() || found.back() < capacity) found.push_back(capacity);
  }
  return found;
}

}  // namespace megagraph
