// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/capture/main_grad_node.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "csrc/torch/thread_state.h"

namespace megagraph {

using torch::autograd::Node;
using torch::autograd::variable_list;

// A sink like AccumulateGrad, with its highest priority.
class AccumulatorSwap::MainGradNode final : public Node {
 public:
  MainGradNode(GradTarget target, std::shared_ptr<SideBranch> additions,
               std::shared_ptr<std::vector<at::Tensor>> reached)
      : Node(std::numeric_limits<uint64_t>::max()),
        target_(std::move(target)),
        additions_(std::move(additions)),
        reached_(std::move(reached)) {
    add_input_metadata(target_.param);
  }

  variable_list apply(variable_list&& grads) override {
    at::Tensor& grad = grads[0];
    if (!grad.defined()) return {};
    const at::NoGradGuard no_grad;
    if (target_.main_grad.defined()) {
      if (!std::exchange(is_reached_, true)) reached_->push_back(target_.param);
      if (target_.already_added && target_.already_added()) return {};
      additions_->run(grad, [&] { target_.main_grad.add_(grad); });
    } else if (kept_.defined()) {
      kept_ = kept_ + grad;  // a re-entrant backward delivers in several parts
      has_parts_ = true;
    } else {
      kept_ = grad.contiguous();
    }
    return {};
  }

  std::string name() const override { return "MegagraphMainGrad"; }
  bool keeps() const { return !target_.main_grad.defined(); }
  bool has_parts() const { return has_parts_; }
  at::Tensor take_kept() { return std::exchange(kept_, at::Tensor()); }

 private:
  const GradTarget target_;
  const std::shared_ptr<SideBranch> additions_;
  const std::shared_ptr<std::vector<at::Tensor>> reached_;
  bool is_reached_ = false;
  at::Tensor kept_;
  bool has_parts_ = false;
};

AccumulatorSwap::AccumulatorSwap(std::vector<GradTarget> targets)
    : additions_(std::make_shared<SideBranch>(targets.empty() ? c10::Device(c10::kCPU)
                                                              : targets.front().param.device())),
      reached_(std::make_shared<std::vector<at::Tensor>>()) {
  swapped_.reserve(targets.size());
  for (GradTarget& target : targets) {
    at::Tensor param = target.param;
    TORCH_CHECK(param.is_leaf() && param.requires_grad(),
                "only leaves that require a gradient have an accumulator to swap");
    auto ours = own_node(new MainGradNode(std::move(target), additions_, reached_));
    swapped_.push_back({std::move(param), std::move(ours), nullptr});
  }
}

AccumulatorSwap::~AccumulatorSwap() { restore(); }

void AccumulatorSwap::install() {
  TORCH_CHECK(!installed_, "the accumulators are swapped already");
  for (Swapped& swapped : swapped_) swapped.original = accumulator_of(swapped.param);
  installed_ = true;
  // Casts of weights that autocast keeps lead to their accumulators of now, and hold their values.
  kept_casts_ = set_keeps_casts(false);
  for (const Swapped& swapped : swapped_) set_accumulator(swapped.param, swapped.ours);
}

void AccumulatorSwap::join() { additions_->join(); }

void AccumulatorSwap::restore() noexcept {
  if (!installed_) return;
  installed_ = false;
  set_keeps_casts(kept_casts_);
  additions_->forget();
  for (Swapped& swapped : swapped_) {
    set_accumulator(swapped.param, std::exchange(swapped.original, AccumulatorPtr()));
  }
}

bool AccumulatorSwap::has_parts() const {
  return std::any_of(swapped_.begin(), swapped_.end(),
                     [](const Swapped& swapped) { return swapped.ours->has_parts(); });
}

void AccumulatorSwap::take_left_grads() {
  for (const Swapped& swapped : swapped_) {
    at::Tensor param = swapped.param;
    if (swapped.ours->keeps() || !param.grad().defined()) continue;
    swapped.ours->apply({std::exchange(param.mutable_grad(), at::Tensor()).detach()});
  }
}

ParamGrads AccumulatorSwap::take_kept_grads() {
  ParamGrads arrived;
  for (const Swapped& swapped : swapped_) {
    if (!swapped.ours->keeps()) continue;
    at::Tensor grad = swapped.ours->take_kept();
    if (grad.defined()) arrived.emplace_back(swapped.param, std::move(grad));
  }
  return arrived;
}

}  // namespace megagraph
