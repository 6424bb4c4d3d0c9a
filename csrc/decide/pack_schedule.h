// SPDX-License-Identifier: Apache-2.0
// Deals the documents of one step out to ranks that may share them in groups of several sizes.
//
// Note [Schedules of packs]
// A group of size c is c neighbouring ranks, the first one a multiple of c; so groups are nested.
// In one micro-batch each rank runs one pack, alone or with its group, and other groups may have
// another size. All ranks run equally many micro-batches, each in order of falling sizes, and of
// one size in order of falling costs. All ranks of a group have then run the same packs before,
// and none waits for another one: a step takes as long as the rank with the largest sum of costs.
// That is what is made small, for the fewest micro-batches that were found, since a replayed
// micro-batch runs its whole capacity anyhow.
//
// The largest documents are placed first, each into the group with the least cost so far; a
// document that would cost a rank too much alone is given to more ranks. Several limits of "too
// much" are tried, and the schedule whose costliest rank costs least is taken.
// Nothing but the arguments enters, and the arithmetic is exact or rounds alike on every machine:
// ranks that see the same lengths schedule alike.
#pragma once

#include <cstdint>
#include <vector>

namespace megagraph {

struct ScheduleLimits {
  int64_t ranks;
  std::vector<int64_t> cp_sizes;  // ascending powers of two; the largest divides the ranks
  int64_t max_tokens, max_seqs;   // of one rank in one micro-batch
  int64_t alignment;         // a document's rows on one rank are a multiple, of twice it if c > 1
  int64_t attention_parity;  // length at which attention costs what the rest of a layer does
  double exchange;           // cost of fetching a token's keys and values, of a token's rest
  int64_t multiple;          // of micro-batches

  // Throws std::invalid_argument.
  void check() const;
  void require_size(int64_t size) const;  // that a group may have

  // Of a document on each of the ranks that share it; zigzag: each has two pieces of equal length.
  int64_t rows(int64_t length, int64_t size) const {
    const int64_t step = (size == 1 ? 1 : 2) * alignment;
    return (length + size * step - 1) / (size * step) * step;
  }
};

struct ScheduledPack {
  int64_t cp_size, first_rank;     // the others that share it follow that one
  std::vector<int64_t> documents;  // ascending
};

struct PackSchedule {
  std::vector<std::vector<ScheduledPack>> micro_batches;  // packs by their first rank
  std::vector<double> costs;                              // of each rank, in tokens
  // The packs of one rank, one for each micro-batch.
  std::vector<ScheduledPack> of_rank(int64_t rank) const;
};

// Throws std::invalid_argument for lengths that leave no schedule, and where none was found. The
// limits are checked.
PackSchedule schedule_packs(const std::vector<int64_t>& lengths, const ScheduleLimits& limits);

}  // namespace megagraph
