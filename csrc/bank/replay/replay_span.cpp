// SPDX-License-Identifier: Apache-2.0
// Replays a span of sites that follow one another: one, or all of a bank.
//
// Note [Spans]
// Each output lies where the next site reads it. Handed out to the host between two
// sites, it would cost a leased tensor, an autograd node and a way through Python, several times
// the launch itself. So where every site has its graph and takes over the one before it,
// they are launched in one call, with one node as their history, whose backward launches theirs.
// Where that does not hold, nothing is done, and the host calls site by site.

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "csrc/bank/replay/finish.h"
#include "csrc/bank/replay/graph_bank.h"
#include "csrc/bank/replay/launch.h"
#include "csrc/bank/replay/leased_storage.h"
#include "csrc/torch/profiler_range.h"
#include "csrc/bank/replay/replay_node.h"
#include "csrc/torch/thread_state.h"

namespace megagraph {
namespace {

// Whether eager would: what trains nothing in front of a part that stays eager may not have that
// part run a backward, where ranks of other packs may wait for one.
bool needs_gradient(const VariantGraphs& graphs, int first, int last,
                    const std::vector<at::Tensor>& inputs) {
  const auto sites = graphs.sites.begin();
  return std::any_of(inputs.begin(), inputs.end(),
                     [](const at::Tensor& input) { return input.requires_grad(); }) ||
         std::any_of(sites + first, sites + last + 1,
                     [](const auto& graph) { return graph->trains(); });
}

}  // namespace

bool GraphBank::is_linked() const {
  if (current_ == nullptr || status_->state.load() == BankState::kReleased) return false;
  return graphs_[current_->variant()][current_->index()]->is_linked;
}

std::optional<EagerReason> GraphBank::replay(int first, int last,
                                             const std::vector<at::Tensor>& inputs,
                                             std::vector<at::Tensor>& outputs) {
  TORCH_CHECK(current_ != nullptr, "site ", first, " was called outside a micro-batch of its bank");
  if (status_->state.load() == BankState::kReleased) return EagerReason::kReleased;
  const RunningPass running(status_);
  const std::shared_ptr<Slot> slot = current_;
  const int variant = slot->variant();
  const bool training = variants_[variant].training;
  const auto graphs = graphs_[variant][slot->index()];
  const SiteGraph* entry = graphs->sites[first].get();
  if (const auto reason = sites_[first]->eager_reason(entry, training, inputs)) return reason;
  if (training && has_saved_tensor_hooks()) return EagerReason::kRecomputing;
  // Staging another tensor into a chained input would overwrite the previous site's output, which
  // its backward or its reader may still need.
  if (entry->is_chained && slot->is_held(first - 1) &&
      inputs.front().const_data_ptr() != entry->boundaries.inputs.front().const_data_ptr()) {
    return EagerReason::kNesting;
  }
  for (int site = first; site <= last; ++site) {
    const bool may_wait = run_eager_alike_ != nullptr;
    if (is_facing_held(slot->index(), site, may_wait)) return EagerReason::kNesting;
  }
  const auto are_transients_gone = [&](Slot& of) {
    // A rank that did not wait might be the only one to run eager.
    return run_eager_alike_ ? of.await_transients() : of.await_stray_transients();
  };
  const auto other = facing(slot->index());
  if (other != nullptr && !are_transients_gone(*other)) return EagerReason::kNesting;
  if (status_->state.load() == BankState::kReleased) return EagerReason::kReleased;
  if (!slot->enter(first, last)) {
    if (!are_transients_gone(*slot)) return EagerReason::kNesting;
    if (status_->state.load() == BankState::kReleased) return EagerReason::kReleased;
    if (!slot->enter(first, last)) return EagerReason::kNesting;
  }
  NodePtr<ReplayNode> node;
  if (training) node = ReplayNode::make(*this, slot, graphs, first, last);
  if (poison_) poison_before(slot->index(), first, last);

  SegmentList segments;
  append_metadata(segments);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& buffer = entry->boundaries.inputs[i];
    if (inputs[i].const_data_ptr() == buffer.const_data_ptr()) continue;
    append_input(segments, inputs[i], buffer, /*is_packed=*/entry->is_entry && i == 0);
  }
  int64_t calls = 0;
  {
    const Launch launch(device_);
    stage(segments, device_);
    metadata_pending_ = false;
    for (int site = first; site <= last; ++site) {
      const SiteGraph& graph = *graphs->sites[site];
      const Range range(graph.forward_range, device_);
      graph.forward->launch();
      calls += sites_[site]->calls();
    }
  }

  const size_t begin = outputs.size();
  const SiteGraph& exit = *graphs->sites[last];
  for (size_t i = 0; i < exit.boundaries.outputs.size(); ++i) {
    const LeaseKind kind = exit.is_transient[i] ? LeaseKind::kTransient : LeaseKind::kOutput;
    outputs.push_back(lease_tensor(exit.boundaries.outputs[i], slot, last, kind));
  }
  finish_ = nullptr;
  // A slot that faces another one keeps its memory by what is to come.
  if (node != nullptr && (other != nullptr || needs_gradient(*graphs, first, last, inputs))) {
    finish_ = node->finish();
    node->connect(inputs, {outputs.begin() + static_cast<int64_t>(begin), outputs.end()});
  }
  status_->counters.count_replays(calls);
  return std::nullopt;
}

}  // namespace megagraph
