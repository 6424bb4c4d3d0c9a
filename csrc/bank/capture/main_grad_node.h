// SPDX-License-Identifier: Apache-2.0
// Gradients of parameters while a graph is warmed up or captured.
//
// Note [Accumulator swap]
// DDP keeps each parameter's gradient accumulator, which remembers the stream it was made on; used
// inside a capture it makes the default stream wait for the capturing one, an error in torch
// <= 2.12 (pytorch#180090). It also carries DDP's hook, which must not run at capture. So for the
// time of a warm-up or capture every parameter gets an accumulator of ours, made on the capture
// stream; then the old one, with its hooks, is put back. Plain backward() works meanwhile, through
// re-entrant checkpoints too (where torch.autograd.grad raises).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/bank/capture/side_branch.h"
#include "csrc/torch/accumulators.h"

namespace megagraph {

using ParamGrads = std::vector<std::pair<at::Tensor, at::Tensor>>;

struct GradTarget {
  at::Tensor param;
  // Where Megatron's DDP accumulates; undefined: the gradient itself is kept for the caller.
  at::Tensor main_grad;
  // Whether the layer has added this gradient to main_grad already (fused accumulation).
  std::function<bool()> already_added;
};

// Construct it on the capture stream: the accumulators remember it. The destructor restores.
class AccumulatorSwap {
 public:
  explicit AccumulatorSwap(std::vector<GradTarget> targets);
  ~AccumulatorSwap();
  AccumulatorSwap(const AccumulatorSwap&) = delete;
  AccumulatorSwap& operator=(const AccumulatorSwap&) = delete;

  void install();
  // Ends what runs beside the current stream; before the end of a capture.
  void join();
  void restore() noexcept;

  // What a layer that delays it has left in `.grad` of targets with main_grad: does with it what
  // becomes of one that a backward brings.
  void take_left_grads();

  // Targets without main_grad whose gradient has arrived, with it, in order; forgets these.
  ParamGrads take_kept_grads();
  // Parameters with main_grad, in the order in which a backward first reached them.
  const std::vector<at::Tensor>& reached() const { return *reached_; }
  // Whether the gradient of any of these came in several parts, which were added up: eager adds
  // each to what the parameter holds already, in another order.
  bool has_parts() const;

 private:
  class MainGradNode;
  struct Swapped {
    at::Tensor param;
    NodePtr<MainGradNode> ours;
    AccumulatorPtr original;
  };
  std::shared_ptr<SideBranch> additions_;
  std::shared_ptr<std::vector<at::Tensor>> reached_;
  std::vector<Swapped> swapped_;
  bool installed_ = false;
  bool kept_casts_ = false;  // before that
};

}  // namespace megagraph
