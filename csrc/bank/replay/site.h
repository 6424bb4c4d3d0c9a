// SPDX-License-Identifier: Apache-2.0
// One graphed module call: its captured passes for each variant and slot.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/decide/eager_reason.h"
#include "csrc/bank/executable.h"
#include "csrc/bank/signature.h"
#include "csrc/torch/numerics.h"

namespace megagraph {

class ReadTrace;

// The static tensors on the edges of one site's graphs. They are contiguous. On a GPU they are
// aliases that own no memory: the slot's pool does, and its nesting rule says when they hold valid
// data.
struct Boundaries {
  std::vector<at::Tensor> inputs, outputs;
  std::vector<at::Tensor> grad_outputs;  // undefined if an output has no gradient
  std::vector<at::Tensor> grad_inputs;   // undefined if an input has none
  // Parameters whose gradients autograd delivers (those without main_grad), and the gradients.
  std::vector<at::Tensor> params, param_grads;
};

// What one site captured for one variant and slot.
struct SiteGraph {
  std::unique_ptr<Executable> forward, backward;  // no backward in a variant without gradients
  std::unique_ptr<Executable> finish;  // what a backward leaves to be done later, if anything
  Boundaries boundaries;
  // Parameters with main_grad, in the order in which the backward adds their gradients.
  std::vector<at::Tensor> accumulated;
  // What the graph reads besides: parameters, main_grad, tables.
  std::vector<at::Tensor> reads;
  // What it reads that no module, buffer or argument has; null but in the first slot.
  std::shared_ptr<ReadTrace> borrowed;
  // Whether the backward reads the input, and each output, where eager would: a write in place in
  // between is an error then.
  bool saves_input = false;
  std::vector<bool> saves_outputs;
  // The first site, whose input is the caller's as it was given.
  bool is_entry = false;
  // The input is the previous site's only output, where that lies, and its gradient is that one's.
  bool is_chained = false;
  // Outputs whose memory later passes use, once somebody between the sites has read them.
  std::vector<bool> is_transient;
  // What profilers call its replays; empty if nobody asked.
  std::string forward_range, backward_range, finish_range;

  // Set by the bank: what each input must look like.
  std::vector<TensorSignature> accepts;
  bool released = false;

  // Whether the gradient of the input keeps its memory until the micro-batch has ended. That of a
  // site behind a gap is used again by the passes after it, and is handed out as a copy.
  bool lends_gradient() const { return is_entry || is_chained; }
  // Whether later passes use the memory of an output. One that the backward reads stays allocated
  // until then.
  bool is_given_back(size_t output) const { return is_transient[output] && !saves_outputs[output]; }
  // Whether this can be launched right after `before`; null is the beginning. Not if something else
  // has to come between their backwards.
  bool follows(const SiteGraph* before) const;
  // Whether a backward has gradients of parameters.
  bool trains() const {
    return !accumulated.empty() || !boundaries.params.empty() || finish != nullptr;
  }
  // Of the accumulated parameters: VariantGraphs says what it means.
  bool have_other_grads() const;
  // Fills what is its own with NaN: what the forward is given or hands out, or gradients.
  void poison_kept();
  void poison_gradients();
  void poison_transients();
  void release();
};

class Site {
 public:
  Site() = default;
  Site(const Site&) = delete;
  Site& operator=(const Site&) = delete;

  void add_variant(int num_slots) { graphs_.emplace_back(num_slots); }
  void set_graph(int variant, int slot, std::shared_ptr<SiteGraph> graph) {
    graphs_.at(variant).at(slot) = std::move(graph);
  }
  // Null if this site has none.
  SiteGraph* graph(int variant, int slot) const { return shared_graph(variant, slot).get(); }
  const std::shared_ptr<SiteGraph>& shared_graph(int variant, int slot) const {
    return graphs_.at(variant).at(slot);
  }
  // How many calls one of this site counts as: those of the modules that it stands for.
  void set_calls(int64_t calls) { calls_ = calls; }
  int64_t calls() const { return calls_; }
  // Why a variant has no graph here; counted by every call that finds none.
  void set_eager_reason(EagerReason reason) { eager_reason_ = reason; }
  // Whether somebody has moved or dropped what a graph has borrowed.
  bool have_borrowed_moved() const;
  void drop_variant(int variant);
  void release();

  // Why a call cannot replay a graph of this site; null is no graph.
  std::optional<EagerReason> eager_reason(const SiteGraph* graph, bool training,
                                          const std::vector<at::Tensor>& inputs) const;

 private:
  std::vector<std::vector<std::shared_ptr<SiteGraph>>> graphs_;  // [variant][slot]
  int64_t calls_ = 1;
  EagerReason eager_reason_ = EagerReason::kCaptureFailed;
};

// The graphs of every site for one variant and slot, as replays and their backwards use them. Made
// when the bank is sealed, so that no micro-batch gathers them.
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
