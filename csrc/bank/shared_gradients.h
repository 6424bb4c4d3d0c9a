// SPDX-License-Identifier: Apache-2.0
// Notices backwards in which a parameter of graphs gets several gradients.
//
// Note [Shared gradients]
// Eager adds up all that a backward gives a parameter, and that to main_grad once; DDP is told
// behind it. Each graph adds its own part by itself. So the sum is rounded otherwise, and DDP may
// be told before a part is there. The parts come
// - of several calls of the model in one backward;
// - of layers that run several times in one call;
// - in another way than through the block's output: of a penalty on weights, or of another model
//   that has the same layer.
// Eager calls show all of these, so a model that begins so gets no graphs. One that begins later so
// has one step of other roundings, after which it runs eager; where DDP would reduce too early,
// that step is an error instead.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/torch/nodes.h"

namespace megagraph {

class SharedGradients {
 public:
  // On any thread, in a backward. `micro_batch`: no other one has this number meanwhile.
  void note(int backward, int64_t micro_batch);
  // The same, of an eager call whose output `end` has made. `of_sites`: the parameters of each
  // site.
  void look(const torch::autograd::Node* end, const std::vector<std::vector<at::Tensor>>& of_sites);
  // Whether the running backward brings one of `params` a gradient beside that of a graph.
  bool is_beside(const std::vector<at::Tensor>& params);
  // What was met so far, in words; empty for nothing.
  std::string met() const;

 private:
  mutable std::mutex mutex_;
  bool has_met_calls_ = false;
  const char* met_ = "";
  int backward_ = -1;
  int64_t micro_batch_ = 0;
};

}  // namespace megagraph
