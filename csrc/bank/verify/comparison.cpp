// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/verify/comparison.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <utility>

#include "csrc/torch/numerics.h"

namespace megagraph {
namespace {

constexpr int kFewRuns = 5, kMostRuns = 20;

std::string short_form(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", number);
  return text;
}

// Null if a run has not made it.
const at::Tensor* find(const NamedTensors& run, const std::string& name) {
  const auto found =
      std::find_if(run.begin(), run.end(), [&](const auto& each) { return each.first == name; });
  return found == run.end() ? nullptr : &found->second;
}

}  // namespace

std::string Difference::in_words() const {
  const std::string own =
      is_noisy ? ", and eager there from itself by up to " + short_form(misfit.spread) : "";
  return tensor + " differs from eager by up to " + short_form(misfit.off) + own;
}

Comparison::Comparison(const NamedTensors& graph, const NamedTensors& module) {
  for (const auto& [name, made] : graph) {
    const at::Tensor* const run = find(module, name);
    if (run == nullptr) {
      lone_.push_back(name);
    } else if (!have_same_bits(made, *run)) {
      ranges_.push_back({name, made, RunRange(*run)});
    }
  }
  for (const auto& [name, run] : module) {
    if (find(graph, name) == nullptr) lone_.push_back(name);
  }
  std::sort(lone_.begin(), lone_.end());
}

void Comparison::add(const NamedTensors& module) {
  ++num_runs_;
  unlike_.reset();
  for (Range& range : ranges_) {
    const at::Tensor* const run = find(module, range.name);
    TORCH_CHECK(run != nullptr, "a further run of a module has made no ", range.name);
    range.runs.add(*run);
  }
}

const std::vector<Comparison::Unlike>& Comparison::unlike() {
  if (!unlike_) {
    unlike_.emplace();
    for (const Range& range : ranges_) {
      if (const auto misfit = range.runs.misfit(range.graph)) {
        unlike_->push_back({&range, *misfit});
      }
    }
  }
  return *unlike_;
}

bool Comparison::is_open() {
  if (ranges_.empty() || num_runs_ >= kMostRuns) return false;
  if (num_runs_ < kFewRuns) return true;
  const bool is_noisy = std::any_of(ranges_.begin(), ranges_.end(),
                                    [](const Range& range) { return range.runs.is_noisy(); });
  return is_noisy && !unlike().empty();
}

std::vector<Difference> Comparison::differences(int64_t slot, int64_t index) {
  constexpr Misfit kWhole{std::numeric_limits<double>::infinity(), 0.0};
  std::vector<Difference> found;
  for (const std::string& name : lone_) found.push_back({slot, index, name, kWhole});
  const bool is_exact = uses_deterministic_algorithms();
  for (const auto& [range, misfit] : unlike()) {
    const bool is_rounding = !is_exact && range->runs.differs_as_rounded(range->graph);
    found.push_back({slot, index, range->name, misfit, range->runs.is_noisy(), is_rounding});
  }
  return found;
}

}  // namespace megagraph
