// SPDX-License-Identifier: Apache-2.0
#include "csrc/decide/document_costs.h"

#include <algorithm>
#include <numeric>

namespace megagraph {

DocumentCosts::DocumentCosts(const std::vector<int64_t>& lengths, const ScheduleLimits& limits)
    : num_documents_(static_cast<int>(lengths.size())),
      num_levels_(static_cast<int>(limits.cp_sizes.size())),
      max_tokens_(limits.max_tokens),
      by_length_(lengths.size()) {
  std::iota(by_length_.begin(), by_length_.end(), 0);
  std::stable_sort(by_length_.begin(), by_length_.end(),
                   [&](int a, int b) { return lengths[a] > lengths[b]; });
  table_.reserve(lengths.size() * num_levels_);
  const auto parity = static_cast<double>(limits.attention_parity);
  for (const int64_t length : lengths) {
    const auto valid = static_cast<double>(length);
    for (const int64_t size : limits.cp_sizes) {
      const int64_t rows = limits.rows(length, size);
      const auto ranks = static_cast<double>(size);
      const double fetched = static_cast<double>(rows) * (ranks - 1);
      table_.push_back({rows, static_cast<double>(rows) + valid * valid / (parity * ranks) +
                                  limits.exchange * fetched});
    }
  }
}

int DocumentCosts::level(int document, double limit) const {
  int cheapest = -1;
  for (int level = 0; level < num_levels_; ++level) {
    if (rows(document, level) > max_tokens_) continue;
    if (cost(document, level) <= limit) return level;
    if (cheapest < 0 || cost(document, level) < cost(document, cheapest)) cheapest = level;
  }
  return cheapest;
}

}  // namespace megagraph
