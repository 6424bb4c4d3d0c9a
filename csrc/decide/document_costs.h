// SPDX-License-Identifier: Apache-2.0
// What a document costs each rank that shares it, for each size of a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/decide/pack_schedule.h"

namespace megagraph {

// Sizes are known by their place in `cp_sizes`, the level.
class DocumentCosts {
 public:
  DocumentCosts(const std::vector<int64_t>& lengths, const ScheduleLimits& limits);

  int num_documents() const { return num_documents_; }
  int num_levels() const { return num_levels_; }
  // The longest first.
  const std::vector<int>& by_length() const { return by_length_; }
  // Rows of the document on each rank, padding included.
  int64_t rows(int document, int level) const { return table_[at(document, level)].rows; }
  // A token's way through a layer without attention is 1.
  double cost(int document, int level) const { return table_[at(document, level)].cost; }
  // The lowest level at which the document fits a rank and costs it at most `limit`; where none
  // does, the one that costs least; -1 where it fits at none.
  int level(int document, double limit) const;

 private:
  struct Entry {
    int64_t rows;
    double cost;
  };

  size_t at(int document, int level) const {
    return static_cast<size_t>(document) * num_levels_ + level;
  }

  int num_documents_, num_levels_;
  int64_t max_tokens_;
  std::vector<Entry> table_;
  std::vector<int> by_length_;
};

}  // namespace megagraph
