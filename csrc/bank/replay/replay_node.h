// SPDX-License-Identifier: Apache-2.0
// The autograd node of a span of replayed sites.
//
// It has edges only to the activation inputs (and to parameters without main_grad): hundreds of
// parameter edges are what makes torch's own graphed callables slow. It runs also when no input
// needs a gradient, since the captured backward adds the parameters' gradients to main_grad.
//
// A second backward through it raises, and so does one after the bank was released or under other
// numeric settings: the forward was a replay, so that there is nothing to run eager.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "csrc/bank/replay/finish.h"
#include "csrc/bank/replay/graph_bank.h"
#include "csrc/bank/replay/site.h"
#include "csrc/bank/replay/slot_ring.h"
#include "csrc/bank/staging/staging.h"
#include "csrc/torch/nodes.h"
#include "csrc/torch/version_counter.h"

namespace megagraph {

class ReplayNode final : public LendingNode {
 public:
  using Graphs = std::shared_ptr<const VariantGraphs>;

  // The slot has been entered for the sites from `first` to `last`, which have their graphs among
  // these; the node leaves it, by its backward or by its end.
  static NodePtr<ReplayNode> make(const GraphBank& bank, std::shared_ptr<Slot> slot, Graphs graphs,
                                  int first, int last);
  // What finishes its backward; null if nothing is left to be done.
  const std::shared_ptr<Finish>& finish() const { return finish_; }
  ~ReplayNode() override;
  ReplayNode(const ReplayNode&) = delete;
  ReplayNode& operator=(const ReplayNode&) = delete;

  // Makes this node the history of `outputs`.
  void connect(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  std::string name() const override { return "MegagraphReplay"; }

 private:
  ReplayNode(const GraphBank& bank, std::shared_ptr<Slot> slot, Graphs graphs, int first, int last);
  void let_go() noexcept override;
  SiteGraph& graph_of(int site) const { return *graphs_->sites[site]; }
  void check_unchanged() const;
  // What is copied when they have run, before any other launch, is said by `copies`.
  void launch_backwards(const torch::autograd::variable_list& grads,
                        const SegmentList& copies) const;
  at::Tensor input_grad(size_t edge, SegmentList& copies) const;
  void stage_gradients(const torch::autograd::variable_list& grads) const;
  at::Tensor handed_out(const at::Tensor& grad, int site, const torch::autograd::Edge& edge) const;

  const std::shared_ptr<BankStatus> status_;
  const std::shared_ptr<const GradientListener> listener_;
  const c10::Device device_;
  const std::shared_ptr<Slot> slot_;
  const std::shared_ptr<Slot> facing_;  // or null
  const Graphs graphs_;
  const int first_, last_;
  std::shared_ptr<Finish> finish_;
  std::vector<int64_t> input_rows_;
  std::vector<size_t> edge_inputs_;  // which input each leading edge belongs to
  std::vector<WriteWatch> saved_;    // of inputs and outputs that the backward reads
  bool pending_ = true;
};

}  // namespace megagraph
