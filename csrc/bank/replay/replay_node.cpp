// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/replay/replay_node.h"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "csrc/bank/replay/launch.h"
#include "csrc/bank/replay/leased_storage.h"
#include "csrc/torch/profiler_range.h"
#include "csrc/torch/accumulators.h"
#include "csrc/torch/numerics.h"
#include "csrc/torch/storages.h"
#include "csrc/torch/thread_state.h"

namespace megagraph {

using torch::autograd::variable_list;

ReplayNode::ReplayNode(const GraphBank& bank, std::shared_ptr<Slot> slot, Graphs graphs, int first,
                       int last)
    : status_(bank.status()),
      listener_(bank.listener()),
      device_(bank.device()),
      slot_(std::move(slot)),
      facing_(bank.facing(slot_->index())),
      graphs_(std::move(graphs)),
      first_(first),
      last_(last) {
  if (graph_of(last_).finish != nullptr) {
    finish_ = std::make_shared<Finish>(bank, slot_, graphs_, last_);
  }
}

NodePtr<ReplayNode> ReplayNode::make(const GraphBank& bank, std::shared_ptr<Slot> slot,
                                     Graphs graphs, int first, int last) {
  return own_node(new ReplayNode(bank, std::move(slot), std::move(graphs), first, last));
}

ReplayNode::~ReplayNode() { let_go(); }

// Runs on any thread, without the GIL, and touches no Python.
void ReplayNode::let_go() noexcept {
  if (!pending_) return;
  pending_ = false;
  if (finish_ != nullptr) finish_->give_up();
  slot_->drop(first_, last_);
}

void ReplayNode::connect(const std::vector<at::Tensor>& inputs,
                         const std::vector<at::Tensor>& outputs) {
  const SiteGraph &entry = graph_of(first_), &exit = graph_of(last_);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (entry.saves_input) saved_.emplace_back(inputs[i]);
    input_rows_.push_back(inputs[i].dim() > 0 ? inputs[i].size(0) : 1);
    if (!inputs[i].requires_grad() || !entry.boundaries.grad_inputs[i].defined()) continue;
    add_next_edge(gradient_edge_of(inputs[i]));
    edge_inputs_.push_back(i);
  }
  // From the last site to the first, as eager adds up the gradients of a parameter they share.
  for (int site = last_; site >= first_; --site) {
    for (const at::Tensor& param : graph_of(site).boundaries.params) {
      add_next_edge(gradient_edge_of(param));
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (exit.boundaries.grad_outputs[i].defined()) {
      torch::autograd::set_history(outputs[i], getptr());
    } else {
      add_input_metadata(Node::undefined_input());
    }
    if (exit.saves_outputs[i]) saved_.emplace_back(outputs[i]);
  }
}

void ReplayNode::stage_gradients(const variable_list& grads) const {
  SegmentList segments;
  std::vector<at::Tensor> dense;  // lives until the launch below is enqueued
  const auto& buffers = graph_of(last_).boundaries.grad_outputs;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const at::Tensor& buffer = buffers[i];
    if (!buffer.defined()) continue;
    Segment segment{};
    segment.kind = SegmentKind::kCopy;
    segment.dst = buffer.mutable_data_ptr();
    segment.dst_size = static_cast<int64_t>(buffer.nbytes());
    if (grads[i].defined()) {
      // Of one that is negated when somebody reads it, the memory has other values.
      dense.push_back(grads[i].resolve_neg().contiguous());
      if (dense.back().const_data_ptr() == buffer.const_data_ptr()) continue;
      TORCH_CHECK(
          grads[i].sizes() == buffer.sizes() && grads[i].scalar_type() == buffer.scalar_type(),
          "gradient of output ", i, " of site ", last_, ": expected ", buffer.scalar_type(), " ",
          buffer.sizes(), ", got ", grads[i].scalar_type(), " ", grads[i].sizes());
      segment.src = dense.back().const_data_ptr();
      segment.src_size = static_cast<int64_t>(dense.back().nbytes());
    }
    segments.add(segment);
  }
  stage(segments, device_);
}

// What cannot be run eager any more, since the forward was a replay.
void ReplayNode::check_unchanged() const {
  TORCH_CHECK(pending_, "site ", last_,
              " was asked for a second backward, but its graph's saved tensors live for one: run "
              "the forward again, or keep this call out of graphs");
  TORCH_CHECK(!at::GradMode::is_enabled(), "site ", last_,
              " was asked for a gradient of its gradient "
              "(create_graph=True), which no graph has: keep this call out of graphs");
  for (int site = first_; is_partial_backward() && site <= last_; ++site) {
    const SiteGraph& graph = graph_of(site);
    TORCH_CHECK(
        graph.accumulated.empty() && graph.finish == nullptr, "site ", site,
        " was asked for some gradients alone (autograd.grad() or backward(inputs=...)), but "
        "its graph adds to main_grad, too: ask for all, or keep this call out of graphs");
  }
  TORCH_CHECK(!graph_of(first_).released,
              "the bank was released between the forward and the backward of "
              "site ",
              last_);
  for (const WriteWatch& saved : saved_) {
    TORCH_CHECK(!saved.has_seen_write(), "the input of site ", first_, " or the output of site ",
                last_,
                ", which this backward needs, has been modified by an inplace operation since the "
                "forward");
  }
  const std::string changed =
      graphs_->numerics.difference_in_backward(NumericSettings::current(device_.type()));
  TORCH_CHECK(changed.empty(), "a numeric setting (", changed,
              ") changed between the forward and the backward of site ", last_,
              ", and its graphs were captured for one: keep it through a micro-batch, or keep this "
              "call out of graphs");
  for (int site = first_; site <= last_; ++site) {
    if (!status_->shared_gradients.is_beside(graph_of(site).accumulated)) continue;
    TORCH_CHECK(
        listener_ == nullptr || !slot_->wants_notice(listener_->wants), "site ", site,
        ": this backward brings one of its parameters another gradient, as of a penalty on weights "
        "or of a call that ran eager, but its graph adds to main_grad by itself, and with "
        "overlap_grad_reduce DDP would reduce that before both are there: have each in a backward "
        "of its own, or keep this call out of graphs");
    break;
  }
}

void ReplayNode::launch_backwards(const variable_list& grads, const SegmentList& copies) const {
  std::optional<Launch> launch(device_);
  stage_gradients(grads);
  for (int site = last_, untold = last_; site >= first_; --site) {
    if (!launch) launch.emplace(device_);
    {
      const SiteGraph& graph = graph_of(site);
      const Range range(graph.backward_range, device_);
      graph.backward->launch();
    }
    if (site == first_) stage(copies, device_);
    if (listener_ == nullptr || (site > first_ && !listener_->is_noticed[site])) continue;
    // The answer may have to wait for the GIL: asked after the first launch, outside of any.
    launch.reset();
    if (slot_->wants_notice(listener_->wants)) listener_->done(site, untold);
    untold = site - 1;
  }
}

// The gradient of an input: where it lies, or a copy that is made behind the backward. A leaf would
// keep the tensor, and with it the slot, as its .grad; behind a gap other passes use the memory.
at::Tensor ReplayNode::input_grad(size_t edge, SegmentList& copies) const {
  const size_t input = edge_inputs_[edge];
  const at::Tensor& grad = graph_of(first_).boundaries.grad_inputs[input];
  at::Tensor leased = lease_tensor(grad, slot_, first_, LeaseKind::kGradient, input_rows_[input]);
  if (!is_leaf_edge(next_edge(edge)) && graph_of(first_).lends_gradient()) return leased;
  const NoDispatchModes plain;
  const c10::DeviceGuard guard(device_);
  c10::DataPtr memory = c10::GetAllocator(device_.type())->allocate(leased.nbytes());
  at::Tensor copy = alias_like(leased, std::move(memory), {});  // which nobody fills before
  Segment segment{};
  segment.kind = SegmentKind::kCopy;
  segment.src = leased.const_data_ptr();
  segment.dst = copy.mutable_data_ptr();
  segment.src_size = segment.dst_size = static_cast<int64_t>(copy.nbytes());
  copies.add(segment);
  return copy;
}

// The gradient of a parameter without main_grad. It lies in the pool, which the next micro-batch
// may write before autograd has brought it to the parameter. One that is added to what the
// parameter holds is leased for so long; a parameter that holds nothing would keep the lease.
at::Tensor ReplayNode::handed_out(const at::Tensor& grad, int site,
                                  const torch::autograd::Edge& edge) const {
  if (is_partial_backward() || !has_gradient(edge)) return grad.clone();
  return lease_tensor(grad, slot_, site, LeaseKind::kGradient);
}

variable_list ReplayNode::apply(variable_list&& grads) {
  const RunningPass running(status_);
  const bool are_transients_gone =
      slot_->await_transients() && (facing_ == nullptr || facing_->await_transients());
  check_unchanged();
  TORCH_CHECK(are_transients_gone, "backward of site ", last_,
              " while somebody holds an output that only what lies between two sites may read (",
              slot_->describe_holders(), facing_ == nullptr ? "" : "; ",
              facing_ == nullptr ? "" : facing_->describe_holders(), "): its memory is used again");
  TORCH_CHECK(slot_->leave(first_, last_), "backward of site ", last_,
              " out of order: a later site's backward is still to come or to be finished (",
              slot_->describe_holders(), "), so its saved tensors may be overwritten");
  pending_ = false;
  const auto accumulates = [](const auto& graph) { return !graph->accumulated.empty(); };
  if (std::any_of(graphs_->sites.begin() + first_, graphs_->sites.begin() + last_ + 1,
                  accumulates)) {
    status_->shared_gradients.note(backward_number(), slot_->index());
  }
  struct Done {
    Slot& slot;
    int first, last;
    std::shared_ptr<Finish> rest;
    bool is_left = false;  // to be done later
    ~Done() {
      if (is_left) return;
      if (rest != nullptr) rest->give_up();
      slot.node_done(first, last);
    }
  } done{*slot_, first_, last_, std::move(finish_)};

  variable_list result(num_outputs());
  SegmentList copies;
  size_t edge = 0;
  for (; edge < edge_inputs_.size(); ++edge) {
    if (task_should_compute_output(edge)) result[edge] = input_grad(edge, copies);
  }
  launch_backwards(grads, copies);
  for (int site = last_; site >= first_; --site) {
    for (const at::Tensor& grad : graph_of(site).boundaries.param_grads) {
      if (task_should_compute_output(edge)) {
        result[edge] = handed_out(grad, site, next_edge(edge));
      }
      ++edge;
    }
  }
  if (done.rest != nullptr) {
    done.rest->await(std::move(saved_));
    done.is_left = true;
  }
  return result;
}

}  // namespace megagraph
