// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/replay/site.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>

#include "csrc/bank/capture/read_trace.h"

namespace megagraph {
namespace {

void fill_with_nan(const at::Tensor& t) {
  if (t.defined() && t.is_floating_point()) {
    t.detach().fill_(std::numeric_limits<double>::quiet_NaN());
  }
}

}  // namespace

bool SiteGraph::follows(const SiteGraph* before) const {
  if (finish != nullptr || boundaries.inputs.size() != 1 || boundaries.outputs.size() != 1) {
    return false;
  }
  return before == nullptr ? is_entry : is_chained;
}

bool SiteGraph::have_other_grads() const {
  return std::any_of(accumulated.begin(), accumulated.end(),
                     [](const at::Tensor& param) { return param.grad().defined(); });
}

void SiteGraph::poison_kept() {
  for (size_t i = 0; i < is_transient.size(); ++i) {
    if (!is_given_back(i)) fill_with_nan(boundaries.outputs[i]);
  }
  if (is_chained) return;  // the input is another site's output
  for (const at::Tensor& t : boundaries.inputs) fill_with_nan(t);
}

void SiteGraph::poison_gradients() {
  for (const auto* boundary :
       {&boundaries.grad_outputs, &boundaries.grad_inputs, &boundaries.param_grads}) {
    for (const at::Tensor& t : *boundary) fill_with_nan(t);
  }
}

void SiteGraph::poison_transients() {
  for (size_t i = 0; i < is_transient.size(); ++i) {
    if (is_given_back(i)) fill_with_nan(boundaries.outputs[i]);
  }
}

void SiteGraph::release() {
  *this = SiteGraph{};
  released = true;
}

bool Site::have_borrowed_moved() const {
  return std::any_of(graphs_.begin(), graphs_.end(), [](const auto& slots) {
    const SiteGraph* graph = slots.front().get();
    return graph != nullptr && graph->borrowed != nullptr && graph->borrowed->has_moved();
  });
}

void Site::drop_variant(int variant) {
  for (auto& graph : graphs_.at(variant)) {
    if (graph != nullptr) graph->release();
    graph.reset();
  }
}

void Site::release() {
  for (size_t variant = 0; variant < graphs_.size(); ++variant) {
    drop_variant(static_cast<int>(variant));
  }
  graphs_.clear();
}

std::optional<EagerReason> Site::eager_reason(const SiteGraph* graph, bool training,
                                              const std::vector<at::Tensor>& inputs) const {
  if (graph == nullptr) return eager_reason_;
  if (training != at::GradMode::is_enabled() || inputs.size() != graph->accepts.size()) {
    return EagerReason::kSignatureChanged;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!graph->accepts[i].accepts(inputs[i])) return EagerReason::kSignatureChanged;
  }
  return std::nullopt;
}

}  // namespace megagraph
