// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/shared_gradients.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "csrc/torch/accumulators.h"

namespace megagraph {
namespace {

using torch::autograd::Node;

constexpr const char* kCalls = "several of its calls in one backward pass";
constexpr const char* kRepeated = "layers that run several times in one call";
constexpr const char* kOtherWay =
    "gradients that reach parameters of its layers in another way, as of a penalty on weights,";

// What a backward runs because of `end`, that included.
std::unordered_set<const Node*> behind(const Node* end) {
  std::unordered_set<const Node*> met{end};
  std::vector<const Node*> open{end};
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) {
      const Node* next = edge.function.get();
      if (next != nullptr && met.insert(next).second) open.push_back(next);
    }
  }
  return met;
}

}  // namespace

void SharedGradients::note(int backward, int64_t micro_batch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  has_met_calls_ = has_met_calls_ || (backward == backward_ && micro_batch != micro_batch_);
  backward_ = backward;
  micro_batch_ = micro_batch;
}

void SharedGradients::look(const Node* end, const std::vector<std::vector<at::Tensor>>& of_sites) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr || of_sites.empty()) return;
  std::unordered_map<const Node*, int> parts;  // by accumulator: of what lies behind the output
  for (const auto& params : of_sites) {
    for (const at::Tensor& param : params) parts.emplace(accumulator_of(param).get(), 0);
  }
  parts.erase(nullptr);
  const auto own = behind(end);
  bool has_others = false;
  for (const Node* node : *nodes) {
    for (const auto& edge : node->next_edges()) {
      const auto found = parts.find(edge.function.get());
      if (found == parts.end()) continue;
      has_others = has_others || own.count(node) == 0;
      ++found->second;
    }
  }
  // One parameter may be read several times in a call; not every one of a site is.
  const bool has_repeated = std::any_of(of_sites.begin(), of_sites.end(), [&](const auto& params) {
    return !params.empty() && std::all_of(params.begin(), params.end(), [&](const auto& param) {
      const auto found = parts.find(accumulator_of(param).get());
      return found != parts.end() && found->second > 1;
    });
  });
  if (!has_others && !has_repeated) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  met_ = has_others ? kOtherWay : kRepeated;
}

bool SharedGradients::is_beside(const std::vector<at::Tensor>& params) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const bool is_met = nodes != nullptr && std::any_of(params.begin(), params.end(), [&](auto& it) {
                        const AccumulatorPtr accumulator = accumulator_of(it);
                        return accumulator && nodes->count(accumulator.get()) != 0;
                      });
  if (!is_met) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  met_ = kOtherWay;
  return true;
}

std::string SharedGradients::met() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return has_met_calls_ ? kCalls : met_;
}

}  // namespace megagraph
