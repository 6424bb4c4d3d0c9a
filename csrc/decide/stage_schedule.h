// SPDX-License-Identifier: Apache-2.0
// The order in which a pipeline stage runs its micro-batches, and how many of them are in flight at
// most. Knows Megatron's schedules by what they do (without pipelining, 1F1B and interleaved 1F1B,
// of megatron.core.pipeline_parallel.schedules), and calls none of them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace megagraph {

// A forward, or else a backward, of a micro-batch through one model chunk of a stage.
struct Pass {
  bool is_forward;
  int64_t chunk, micro_batch;  // counted from 0
};

// Of one stage of a pipeline with `chunks` model chunks each. `group_size` micro-batches run
// through a chunk before the next chunk's turn; by default as many as there are stages. With expert
// overlap a forward runs beside the backward of another micro-batch.
struct StageSchedule {
  int64_t stages, stage, chunks;
  std::optional<int64_t> group_size;
  bool has_expert_overlap;

  // Throws std::invalid_argument if no schedule of Megatron's takes these values.
  void check() const;
  // Whether a step may have so many micro-batches.
  bool is_legal(int64_t count) const;
  // In the order in which the stage runs a step; throws if the count is not legal.
  std::vector<Pass> passes(int64_t count, bool forward_only = false) const;
  // The most micro-batches of each chunk between their forward and the end of their backward: in a
  // step, and in any step.
  std::vector<int64_t> in_flight(int64_t count) const;
  std::vector<int64_t> most_in_flight() const;

 private:
  int64_t group() const { return group_size.value_or(stages); }
  // Forwards before the first backward, if the step has as many.
  int64_t warm_up() const;
};

}  // namespace megagraph
