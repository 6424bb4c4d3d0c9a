// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/site.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <limits>
#include <utility>

#include "csrc/bank/chunk.h"

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

}  // namespace megagraph
