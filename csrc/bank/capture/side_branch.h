// SPDX-License-Identifier: Apache-2.0
// Work beside the main line of a capture: a second stream that is forked from it and joined again.
//
// Note [Side branch]
// Additions to main_grad move ten bytes a parameter and compute nothing. In eager they run on the
// stream on which DDP was built, which hosts make another one, beside the next matrix product;
// captured on one stream they would run between the products. Each addition depends on its gradient
// only, so it is a branch of the graph. Order among additions stays, since they share one stream.
// Nobody else may write a gradient after it was delivered, nor the same main_grad on the main line.
//
// A gradient must outlive its addition: its memory belongs to the main line, which hands it out
// again as soon as the tensor is gone. So the branch holds gradients, at most kMaxPending, and the
// main line waits for the oldest addition before that one is let go.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace megagraph {

class SideBranch {
 public:
  // Makes the device's second stream, which no capture should have to.
  explicit SideBranch(c10::Device device);
  ~SideBranch();
  SideBranch(const SideBranch&) = delete;
  SideBranch& operator=(const SideBranch&) = delete;

  // Runs `work`, which reads `input` and allocates nothing: beside the current stream where that is
  // being captured, on it otherwise.
  void run(const at::Tensor& input, const std::function<void()>& work);
  // The current stream waits for everything; a capture cannot end before.
  void join();
  // Lets go of what was not joined: the capture failed.
  void forget() noexcept;

 private:
  struct Pending;
  std::unique_ptr<Pending> pending_;
};

}  // namespace megagraph
