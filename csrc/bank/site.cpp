// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/site.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <limits>
#include <utility>

#include "csrc/bank/chunk.h"
#include "csrc/bank/leased_storage.h"
#include "csrc/bank/range.h"
#include "csrc/bank/replay_node.h"

namespace megagraph {

void SiteGraph::poison() {
  for (const auto* boundary : {&inputs, &outputs, &grad_outputs, &grad_inputs}) {
    for (const at::Tensor& t : *boundary) {
      if (t.defined() && t.is_floating_point()) {
        t.detach().fill_(std::numeric_limits<double>::quiet_NaN());
      }
    }
  }
}

void SiteGraph::release() {
  *this = SiteGraph{};
  released = true;
}

void Site::add_variant(int num_slots) { graphs_.emplace_back(num_slots); }

void Site::set_graph(int variant, int slot, std::shared_ptr<SiteGraph> graph) {
  TORCH_CHECK(graph->forward != nullptr, "site ", rank_, " has no forward to replay");
  TORCH_CHECK((graph->backward != nullptr) == chunk_.variant(variant).training, "site ", rank_,
              ": a training variant needs a backward, any other has none");
  TORCH_CHECK(graph->inputs.size() == graph->accepts.size() &&
                  graph->inputs.size() == graph->grad_inputs.size() &&
                  graph->outputs.size() == graph->grad_outputs.size() &&
                  graph->params.size() == graph->param_grads.size(),
              "site ", rank_, ": every boundary needs its gradient's place");
  auto& place = graphs_.at(variant).at(slot);
  TORCH_CHECK(place == nullptr, "site ", rank_, " has captured variant ", variant, ", slot ", slot,
              " already");
  const SiteGraph* before = rank_ == 0 ? nullptr : chunk_.site(rank_ - 1).graph(variant, slot);
  graph->is_chained = before != nullptr && before->outputs.front().const_data_ptr() ==
                                               graph->inputs.front().const_data_ptr();
  chunk_.add_document_grids(variant, slot, *graph->forward);
  if (graph->backward != nullptr) chunk_.add_document_grids(variant, slot, *graph->backward);
  place = std::move(graph);
}

SiteGraph* Site::graph(int variant, int slot) const { return graphs_.at(variant).at(slot).get(); }

void Site::release() {
  for (auto& slots : graphs_) {
    for (auto& graph : slots) {
      if (graph != nullptr) graph->release();
    }
  }
  graphs_.clear();
}

std::optional<EagerReason> Site::refuse(const SiteGraph* graph, bool training,
                                        const std::vector<at::Tensor>& inputs) const {
  if (graph == nullptr) return eager_reason_;
  if (training != at::GradMode::is_enabled() || inputs.size() != graph->inputs.size()) {
    return EagerReason::kSignatureChanged;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!graph->accepts[i].accepts(inputs[i])) return EagerReason::kSignatureChanged;
  }
  return std::nullopt;
}

std::optional<EagerReason> Site::replay(const std::vector<at::Tensor>& inputs,
                                        std::vector<at::Tensor>& outputs) {
  const std::shared_ptr<Slot>& slot = chunk_.current();
  TORCH_CHECK(slot != nullptr, "site ", rank_, " was called outside a micro-batch of its chunk");
  if (chunk_.bank()->state.load() == BankState::kReleased) {
    chunk_.bank()->counters.count_eager(EagerReason::kReleased, 1);
    return EagerReason::kReleased;
  }
  const int variant = slot->variant();
  const std::shared_ptr<SiteGraph>& graph = graphs_.at(variant)[slot->index()];
  const bool training = chunk_.variant(variant).training;
  std::optional<EagerReason> reason = refuse(graph.get(), training, inputs);
  // Staging another tensor into a chained input would overwrite the previous site's output, which
  // its backward or its reader may still need.
  if (!reason && graph->is_chained && slot->is_held(rank_ - 1) &&
      inputs.front().const_data_ptr() != graph->inputs.front().const_data_ptr()) {
    reason = EagerReason::kNesting;
  }
  if (!reason && !slot->enter(rank_)) reason = EagerReason::kNesting;
  if (reason) {
    chunk_.bank()->counters.count_eager(*reason, 1);
    return reason;
  }

  const Range range(graph->forward_range, chunk_.device());
  std::shared_ptr<ReplayNode> node;
  if (training) node = ReplayNode::make(chunk_, slot, rank_, graph);

  SegmentList segments;
  chunk_.append_metadata(segments);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].const_data_ptr() == graph->inputs[i].const_data_ptr()) continue;
    chunk_.append_input(segments, inputs[i], graph->inputs[i], /*is_packed=*/rank_ == 0 && i == 0);
  }
  stage(segments, chunk_.device());
  graph->forward->launch();

  const size_t first = outputs.size();
  for (const at::Tensor& boundary : graph->outputs) {
    outputs.push_back(lease_tensor(boundary, slot, rank_, LeaseKind::kOutput));
  }
  if (node != nullptr) {
    node->connect(inputs, {outputs.begin() + static_cast<int64_t>(first), outputs.end()});
  }
  chunk_.bank()->counters.count_replay();
  return std::nullopt;
}

}  // namespace megagraph
