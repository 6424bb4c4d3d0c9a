// SPDX-License-Identifier: Apache-2.0
// What the backward of a replayed site has left to be done later: its third pass.
//
// Note [Third pass]
// A site may delay work of its backward, gradients of weights that nobody waits for. It is captured
// right behind the backward, as a graph of its own, and reads what that one has left in the pool.
// So a site whose backward has run is unfinished, and nothing else may enter its slot: a forward
// runs eager, a backward raises. Other slots go on. The slot is held until then, and whoever
// listens for gradients is told of these then, and of the others with the backward.
//
// The forward makes the handle that launches it, so that it is that micro-batch's. One that goes
// while its site is unfinished has lost gradients: the bank says so before its next micro-batch.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/bank/replay/graph_bank.h"
#include "csrc/bank/replay/slot_ring.h"
#include "csrc/bank/replay/site.h"
#include "csrc/torch/version_counter.h"

namespace megagraph {

class Finish {
 public:
  Finish(const GraphBank& bank, std::shared_ptr<Slot> slot,
         std::shared_ptr<const VariantGraphs> graphs, int site);
  ~Finish();
  Finish(const Finish&) = delete;
  Finish& operator=(const Finish&) = delete;

  // The backward has run. `saved` are inputs and outputs of the site that the rest may read too.
  void await(std::vector<WriteWatch> saved);
  // No backward will run any more, or it has failed.
  void give_up() noexcept;
  // Runs it, on the current stream, without the GIL.
  void launch();

 private:
  enum class Stage : uint8_t { kBeforeBackward, kUnfinished, kFinished, kGivenUp };
  void check_unchanged() const;

  const std::shared_ptr<BankStatus> status_;
  const std::shared_ptr<const GradientListener> listener_;
  const c10::Device device_;
  const std::shared_ptr<Slot> slot_;
  const std::shared_ptr<const VariantGraphs> graphs_;
  const int site_;
  std::vector<WriteWatch> saved_;
  std::atomic<Stage> stage_{Stage::kBeforeBackward};
};

}  // namespace megagraph
