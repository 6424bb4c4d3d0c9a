// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/replay_node.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "csrc/bank/leased_storage.h"
#include "csrc/bank/range.h"
#include "csrc/bank/staging.h"

namespace megagraph {

using torch::autograd::variable_list;

namespace {

bool is_leaf_edge(const torch::autograd::Edge& edge) {
  return dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get()) != nullptr;
}

}  // namespace

ReplayNode::ReplayNode(const Chunk& chunk, std::shared_ptr<Slot> slot, int rank,
                       std::shared_ptr<SiteGraph> graph)
    : listener_(chunk.listener()),
      device_(chunk.device()),
      slot_(std::move(slot)),
      rank_(rank),
      graph_(std::move(graph)) {}

std::shared_ptr<ReplayNode> ReplayNode::make(const Chunk& chunk, std::shared_ptr<Slot> slot,
                                             int rank, std::shared_ptr<SiteGraph> graph) {
  // deleteNode unwinds long chains without recursion.
  return {new ReplayNode(chunk, std::move(slot), rank, std::move(graph)),
          torch::autograd::deleteNode};
}

// Runs on any thread, without the GIL, and touches no Python.
ReplayNode::~ReplayNode() {
  if (pending_) slot_->drop(rank_);
}

void ReplayNode::connect(const std::vector<at::Tensor>& inputs,
                         const std::vector<at::Tensor>& outputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    input_rows_.push_back(inputs[i].dim() > 0 ? inputs[i].size(0) : 1);
    if (!inputs[i].requires_grad() || !graph_->grad_inputs[i].defined()) continue;
    add_next_edge(torch::autograd::impl::gradient_edge(inputs[i]));
    edge_inputs_.push_back(i);
  }
  for (const at::Tensor& param : graph_->params) {
    add_next_edge(torch::autograd::impl::gradient_edge(param));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (graph_->grad_outputs[i].defined()) {
      torch::autograd::set_history(outputs[i], shared_from_this());
    } else {
      add_input_metadata(Node::undefined_input());
    }
  }
}

void ReplayNode::stage_gradients(const variable_list& grads) const {
  SegmentList segments;
  std::vector<at::Tensor> dense;  // lives until the launch below is enqueued
  for (size_t i = 0; i < graph_->grad_outputs.size(); ++i) {
    const at::Tensor& buffer = graph_->grad_outputs[i];
    if (!buffer.defined()) continue;
    Segment segment{};
    segment.kind = SegmentKind::kCopy;
    segment.dst = buffer.mutable_data_ptr();
    segment.dst_size = static_cast<int64_t>(buffer.nbytes());
    if (grads[i].defined()) {
      if (grads[i].const_data_ptr() == buffer.const_data_ptr()) continue;
      TORCH_CHECK(
          grads[i].sizes() == buffer.sizes() && grads[i].scalar_type() == buffer.scalar_type(),
          "gradient of output ", i, " of site ", rank_, ": expected ", buffer.scalar_type(), " ",
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
  TORCH_CHECK(pending_, "site ", rank_,
              " was asked for a second backward, but its graph's saved tensors live for one: run "
              "the forward again, or keep this call out of graphs");
  TORCH_CHECK(!at::GradMode::is_enabled(), "site ", rank_,
              " was asked for a gradient of its gradient "
              "(create_graph=True), which no graph has: keep this call out of graphs");
  TORCH_CHECK(!graph_->released,
              "the bank was released between the forward and the backward of "
              "site ",
              rank_);
  TORCH_CHECK(slot_->leave(rank_), "backward of site ", rank_,
              " out of order: a later site's backward is still to come (",
              slot_->describe_holders(), "), so its saved tensors may be overwritten");
  pending_ = false;
  struct Done {
    Slot& slot;
    int rank;
    ~Done() { slot.node_done(rank); }
  } done{*slot_, rank_};

  const Range range(graph_->backward_range, device_);
  stage_gradients(grads);
  graph_->backward->launch();

  variable_list result(num_outputs());
  size_t edge = 0;
  for (; edge < edge_inputs_.size(); ++edge) {
    if (!task_should_compute_output(edge)) continue;
    const size_t input = edge_inputs_[edge];
    result[edge] = lease_tensor(graph_->grad_inputs[input], slot_, rank_, LeaseKind::kGradient,
                                input_rows_[input]);
    // A leaf would keep the tensor, and with it the slot, as its .grad.
    if (is_leaf_edge(next_edge(edge))) result[edge] = result[edge].clone();
  }
  // Here the graph's own reference makes AccumulateGrad clone. torch.autograd.grad() would hand the
  // buffer itself to its caller.
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  const bool is_partial = wanted != nullptr && !wanted->empty();
  for (size_t i = 0; i < graph_->params.size(); ++i) {
    if (!task_should_compute_output(edge + i)) continue;
    result[edge + i] = is_partial ? graph_->param_grads[i].clone() : graph_->param_grads[i];
  }
  if (listener_ != nullptr && slot_->wants_notice(listener_->wants)) listener_->done(rank_);
  return result;
}

}  // namespace megagraph
