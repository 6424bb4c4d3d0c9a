// SPDX-License-Identifier: Apache-2.0
#include "csrc/decide/dispatch.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "csrc/decide/require.h"

namespace megagraph {
namespace {

int64_t power_of_two(int64_t at_least) {
  int64_t power = 1;
  while (power < at_least) power *= 2;
  return power;
}

// What a few steps of warm-up let expect of the steps to come: three deviations above the mean, and
// no less than what was seen.
int64_t with_headroom(const std::vector<int64_t>& seen) {
  const auto count = static_cast<double>(seen.size());
  const double mean = std::accumulate(seen.begin(), seen.end(), 0.0) / count;
  double squares = 0;
  for (const int64_t value : seen) squares += std::pow(static_cast<double>(value) - mean, 2);
  const double expected = std::ceil(mean + 3 * std::sqrt(squares / count));
  return std::max(*std::max_element(seen.begin(), seen.end()), static_cast<int64_t>(expected));
}

// Ranks that share rows must be able to do so.
constexpr int64_t kMultipleOfTokens = 128;

}  // namespace

std::optional<EagerReason> PackShape::exceeds(const Capacity& capacity) const {
  if (tokens > capacity.tokens) return EagerReason::kTooManyTokens;
  if (num_seqs > capacity.num_seqs) return EagerReason::kTooManySequences;
  if (longest() > capacity.max_seqlen) return EagerReason::kSequenceTooLong;
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

Needs needs_of(const std::map<PackShape, int64_t>& observed, int64_t extra_seqs,
               int64_t expected_tokens) {
  if (observed.empty()) return {};
  std::vector<int64_t> tokens, counts;
  for (const auto& [shape, times] : observed) {
    tokens.insert(tokens.end(), times, shape.tokens);
    counts.insert(counts.end(), times, std::max<int64_t>(shape.num_seqs - extra_seqs, 1));
  }
  std::sort(tokens.begin(), tokens.end());
  std::sort(counts.begin(), counts.end());
  int64_t rows = with_headroom(tokens);
  if (rows > tokens.back()) {
    rows = (rows + kMultipleOfTokens - 1) / kMultipleOfTokens * kMultipleOfTokens;
  }
  if (expected_tokens > 1) rows = std::max(expected_tokens, tokens.back());
  return {rows, power_of_two(counts[counts.size() / 2]), power_of_two(with_headroom(counts))};
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
