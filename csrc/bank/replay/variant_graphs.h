// SPDX-License-Identifier: Apache-2.0
// The graphs of every site for one variant and slot, as replays and their backwards use them. Made
// when the bank is sealed, so that no micro-batch gathers them.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "csrc/bank/replay/site.h"
#include "csrc/torch/numerics.h"

namespace megagraph {

struct VariantGraphs {
  std::vector<std::shared_ptr<SiteGraph>> sites;  // null where a site stays eager
  // Whether all of them can be launched in one go: Note [Spans] in replay_span.cpp.
  bool is_linked = false;
  NumericSettings numerics;  // in force when they were captured

  // Whether a parameter with main_grad holds a gradient besides, as one does after Megatron's FP32
  // optimizer until zero_grad(). Eager adds the next gradient to that one, and their sum to
  // main_grad, where a graph adds the next one alone.
  bool have_other_grads() const {
    return std::any_of(sites.begin(), sites.end(), [](const auto& graph) {
      return graph != nullptr && graph->have_other_grads();
    });
  }
};

}  // namespace megagraph
