// SPDX-License-Identifier: Apache-2.0
#include "csrc/torch/accumulators.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <string_view>
#include <typeinfo>

namespace megagraph {
namespace {

template <typename PythonHook, typename Hooks>
int64_t count_hooks(const Hooks& hooks, std::string_view mangled) {
  int64_t count = 0;
  for (const auto& hook : hooks) {
    const auto& type = typeid(*hook);
    count += type.name() == mangled ? PyDict_Size(static_cast<const PythonHook&>(*hook).dict) : 1;
  }
  return count;
}

}  // namespace

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

bool has_gradient(const torch::autograd::Edge& edge) {
  const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
  return leaf != nullptr && leaf->variable.grad().defined();
}

int64_t count_accumulator_hooks(const at::Tensor& param) {
  const auto accumulator = accumulator_of(param);
  if (accumulator == nullptr) return 0;
  return count_hooks<torch::autograd::PyFunctionPostHook>(accumulator->post_hooks(),
                                                          "N5torch8autograd18PyFunctionPostHookE") +
         count_hooks<torch::autograd::PyFunctionPreHook>(accumulator->pre_hooks(),
                                                         "N5torch8autograd17PyFunctionPreHookE");
}

}  // namespace megagraph
