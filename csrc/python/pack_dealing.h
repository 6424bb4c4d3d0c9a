// SPDX-License-Identifier: Apache-2.0
// Takes the documents of a step apart for the ranks that run them, and makes packs of what a rank
// is sent. Exchanges nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "csrc/decide/pack_schedule.h"

namespace megagraph {

// The rows [rows, ...] of a document [L, ...] that a rank in some `place` of a group of `size`
// holds; zeros past the document's end. If the size is not 1, each rank has an even number.
at::Tensor share(const at::Tensor& document, int64_t rows, int64_t size, int64_t place);

// Of one rank, which counts its place among all of them. Rows are the bytes of all tensors of a
// token, so that every byte goes to those ranks only that need it.
class PackDealing {
 public:
  // `lengths`: of each rank's documents, which the schedule counts through, rank 0's first.
  PackDealing(PackSchedule schedule, ScheduleLimits limits,
              const std::vector<std::vector<int64_t>>& lengths, int64_t rank);

  // Of this rank's documents, each some tensors [L] of these types: what all ranks get, in turn.
  at::Tensor outgoing(const std::vector<std::vector<at::Tensor>>& documents,
                      const std::vector<at::ScalarType>& types, at::Device device) const;
  // How many rows go to each rank, and come from each.
  std::vector<int64_t> sent_rows() const;
  std::vector<int64_t> taken_rows() const;
  // Of what has come: this rank's share of its pack in each micro-batch, by type: [rows of the
  // pack's documents, in turn].
  std::vector<std::vector<at::Tensor>> packs(const at::Tensor& taken,
                                             const std::vector<at::ScalarType>& types) const;

 private:
  struct Share {
    int64_t document, rows, size, place;
  };

  int64_t rows(int64_t document, const ScheduledPack& pack) const {
    return limits_.rows(lengths_[document], pack.cp_size);
  }
  std::vector<std::vector<Share>> shares() const;  // of this rank's documents, by who gets them

  const PackSchedule schedule_;
  const ScheduleLimits limits_;
  const int64_t num_ranks_, rank_;
  std::vector<int64_t> lengths_, owners_;  // of all documents
  int64_t first_ = 0;                      // of this rank's
};

}  // namespace megagraph
