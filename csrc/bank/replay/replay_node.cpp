// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/replay/replay_node.h"

#include <utility>

#include "csrc/bank/replay/leased_storage.h"
#include "csrc/bank/replay/range.h"
#include "csrc/bank/staging/staging.h"
#include "csrc/torch/accumulators.h"

namespace megagraph {

using torch::autograd::variable_list;

ReplayNode::ReplayNode(const Chain& chain, std::shared_ptr<Slot> slot, int first, Graphs graphs)
    : listener_(chain.listener()),
      device_(chain.device()),
      slot_(std::move(slot)),
      first_(first),
      last_(first + static_cast<int>(graphs.size()) - 1),
      graphs_(std::move(graphs)) {}

NodePtr<ReplayNode> ReplayNode::make(const Chain& chain, std::shared_ptr<Slot> slot, int first,
                                     Graphs graphs) {
  return own_node(new ReplayNode(chain, std::move(slot), first, std::move(graphs)));
}

ReplayNode::~ReplayNode() { let_go(); }

// Runs on any thread, without the GIL, and touches no Python.
void ReplayNode::let_go() noexcept {
  if (!pending_) return;
  pending_ = false;
  slot_->drop(first_, last_);
}

void ReplayNode::connect(const std::vector<at::Tensor>& inputs,
                         const std::vector<at::Tensor>& outputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    input_rows_.push_back(inputs[i].dim() > 0 ? inputs[i].size(0) : 1);
    if (!inputs[i].requires_grad() || !graphs_.front()->boundaries.grad_inputs[i].defined())
      continue;
    add_next_edge(gradient_edge_of(inputs[i]));
    edge_inputs_.push_back(i);
  }
  // From the last site to the first, as eager adds up the gradients of a parameter they share.
  for (auto graph = graphs_.rbegin(); graph != graphs_.rend(); ++graph) {
    for (const at::Tensor& param : (*graph)->boundaries.params) {
      add_next_edge(gradient_edge_of(param));
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (graphs_.back()->boundaries.grad_outputs[i].defined()) {
      torch::autograd::set_history(outputs[i], getptr());
    } else {
      add_input_metadata(Node::undefined_input());
    }
  }
}

void ReplayNode::stage_gradients(const variable_list& grads) const {
  SegmentList segments;
  std::vector<at::Tensor> dense;  // lives until the launch below is enqueued
  const auto& buffers = graphs_.back()->boundaries.grad_outputs;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const at::Tensor& buffer = buffers[i];
    if (!buffer.defined()) continue;
    Segment segment{};
    segment.kind = SegmentKind::kCopy;
    segment.dst = buffer.mutable_data_ptr();
    segment.dst_size = static_cast<int64_t>(buffer.nbytes());
    if (grads[i].defined()) {
      if (grads[i].const_data_ptr() == buffer.const_data_ptr()) continue;
      TORCH_CHECK(
          grads[i].sizes() == buffer.sizes() && grads[i].scalar_type() == buffer.scalar_type(),
          "gradient of output ", i, " of site ", last_, ": expected ", buffer.scalar_type(), " ",
          buffer.sizes(), ", got ", grads[i].scalar_type(), " ", grads[i].sizes());
      dense.push_back(grads[i].contiguous());
      segment.src = dense.back().const_data_ptr();
      segment.src_size = static_cast<int64_t>(dense.back().nbytes());
    }
    segments.add(segment);
  }
  stage(segments, device_);
}

variable_list ReplayNode::apply(variable_list&& grads) {
  TORCH_CHECK(pending_, "site ", last_,
              " was asked for a second backward, but its graph's saved tensors live for one: run "
              "the forward again, or keep this call out of graphs");
  TORCH_CHECK(!at::GradMode::is_enabled(), "site ", last_,
              " was asked for a gradient of its gradient "
              "(create_graph=True), which no graph has: keep this call out of graphs");
  TORCH_CHECK(!graphs_.front()->released,
              "the bank was released between the forward and the backward of "
              "site ",
              last_);
  TORCH_CHECK(slot_->leave(first_, last_), "backward of site ", last_,
              " out of order: a later site's backward is still to come (",
              slot_->describe_holders(), "), so its saved tensors may be overwritten");
  pending_ = false;
  struct Done {
    Slot& slot;
    int first, last;
    ~Done() { slot.node_done(first, last); }
  } done{*slot_, first_, last_};

  stage_gradients(grads);
  for (int site = last_, untold = last_; site >= first_; --site) {
    {
      const SiteGraph& graph = *graphs_[site - first_];
      const Range range(graph.backward_range, device_);
      graph.backward->launch();
    }
    if (listener_ == nullptr || (site > first_ && !listener_->is_noticed[site])) continue;
    // Asked after the first launch: the answer may have to wait for the GIL.
    if (slot_->wants_notice(listener_->wants)) listener_->done(site, untold);
    untold = site - 1;
  }

  variable_list result(num_outputs());
  size_t edge = 0;
  for (; edge < edge_inputs_.size(); ++edge) {
    if (!task_should_compute_output(edge)) continue;
    const size_t input = edge_inputs_[edge];
    result[edge] = lease_tensor(graphs_.front()->boundaries.grad_inputs[input], slot_, first_,
                                LeaseKind::kGradient, input_rows_[input]);
    // A leaf would keep the tensor, and with it the slot, as its .grad.
    if (is_leaf_edge(next_edge(edge))) result[edge] = result[edge].clone();
  }
  // Here the graph's own reference makes AccumulateGrad clone. torch.autograd.grad() would hand the
  // buffer itself to its caller.
  const bool is_partial = is_partial_backward();
  for (auto graph = graphs_.rbegin(); graph != graphs_.rend(); ++graph) {
    for (const at::Tensor& grad : (*graph)->boundaries.param_grads) {
      if (task_should_compute_output(edge)) result[edge] = is_partial ? grad.clone() : grad;
      ++edge;
    }
  }
  return result;
}

}  // namespace megagraph
