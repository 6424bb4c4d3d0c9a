// SPDX-License-Identifier: Apache-2.0
#include "csrc/torch/accumulators.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace megagraph {

AccumulatorPtr accumulator_of(const at::Tensor& param) {
  return torch::autograd::impl::try_get_grad_accumulator(param);
}

void set_accumulator(const at::Tensor& param, const AccumulatorPtr& accumulator) {
#if MEGAGRAPH_TORCH_SINCE(2, 13)
  const c10::weak_intrusive_ptr<torch::autograd::Node> held(accumulator);
#else
  const std::weak_ptr<torch::autograd::Node> held(accumulator);
#endif
  torch::autograd::impl::set_grad_accumulator(param, held);
}

torch::autograd::Edge gradient_edge_of(const at::Tensor& tensor) {
  return torch::autograd::impl::gradient_edge(tensor);
}

bool is_leaf_edge(const torch::autograd::Edge& edge) {
  return dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get()) != nullptr;
}

at::Tensor other_leaf(const std::vector<at::Tensor>& outputs, const at::Tensor& input) {
  std::vector<torch::autograd::Node*> open;
  std::unordered_set<torch::autograd::Node*> known;
  const auto reach = [&](const torch::autograd::Edge& edge) {
    auto* const node = edge.function.get();
    if (node != nullptr && known.insert(node).second) open.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad()) reach(gradient_edge_of(output));
  }
  while (!open.empty()) {
    torch::autograd::Node* const node = open.back();
    open.pop_back();
    const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node);
    if (leaf != nullptr && !leaf->variable.is_same(input)) return leaf->variable;
    for (const torch::autograd::Edge& edge : node->next_edges()) reach(edge);
  }
  return {};
}

bool has_gradient(const torch::autograd::Edge& edge) {
  const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
  return leaf != nullptr && leaf->variable.grad().defined();
}

}  // namespace megagraph
