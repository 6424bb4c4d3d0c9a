// SPDX-License-Identifier: Apache-2.0
#include "csrc/torch/accumulator_hooks.h"

#include <torch/csrc/autograd/python_hook.h>

#include <string_view>
#include <typeinfo>

#include "csrc/torch/accumulators.h"

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

int64_t count_accumulator_hooks(const at::Tensor& param) {
  const auto accumulator = accumulator_of(param);
  if (accumulator == nullptr) return 0;
  return count_hooks<torch::autograd::PyFunctionPostHook>(accumulator->post_hooks(),
                                                          "N5torch8autograd18PyFunctionPostHookE") +
         count_hooks<torch::autograd::PyFunctionPreHook>(accumulator->pre_hooks(),
                                                         "N5torch8autograd17PyFunctionPreHookE");
}

}  // namespace megagraph
