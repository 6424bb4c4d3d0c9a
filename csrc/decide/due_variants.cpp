// SPDX-License-Identifier: Apache-2.0
#include "csrc/decide/due_variants.h"

#include <iterator>

namespace megagraph {
namespace {

constexpr int kStepsInVain = 3;

template <typename Condition>
void erase_if(VariantKeys& keys, const Condition& is_met) {
  for (auto key = keys.begin(); key != keys.end();) {
    key = is_met(*key) ? keys.erase(key) : std::next(key);
  }
}

}  // namespace

void DueVariants::note(const VariantKey& kind) {
  if (of_step_.insert(kind).second && families_.insert(kind.family()).second) {
    only_first_.insert(kind);
  } else {
    only_first_.erase(kind);
  }
}

VariantKeys DueVariants::end_step() {
  VariantKeys in_vain;
  std::map<VariantKey, VariantKey> fresh;  // one new kind of each family
  for (const VariantKey& kind : of_step_) {
    const bool is_warm = warmed_up_.count(kind) != 0;
    const bool is_of_some_state = kind.state >= 0;  // else each may be another one
    if (is_of_some_state && (is_warm || cold_.count(kind) != 0)) recurring_.insert(kind.family());
    if (!is_warm) fresh.emplace(kind.family(), kind);
    if (passed_over_.count(kind) != 0 && ++steps_passed_over_[kind] == kStepsInVain) {
      in_vain.insert(kind);
    }
  }
  for (const VariantKey& kind : of_step_) {
    if (warmed_up_.count(kind) == 0) cold_.insert(kind);
  }
  for (const auto& [family, kind] : fresh) {
    const int needed = kind.grad && !is_warm_ ? warm_up_steps_ : 1;
    if (++steps_[family] < needed) continue;
    VariantKeys of_family;
    for (const VariantKey& each : cold_) {
      if (each.family() == family) of_family.insert(each);
    }
    for (const VariantKey& each : of_family) {
      if (of_family.size() > 1 && only_first_.count(each) != 0) continue;
      cold_.erase(each);
      warmed_up_.insert(each);
      if (captured_.count(each) == 0) due_.insert(each);  // other ranks may have met some before
    }
  }
  for (VariantKeys* keys : {&due_, &warmed_up_, &cold_}) {
    erase_if(*keys,
             [&](const VariantKey& kind) { return kind.state < 0 && of_step_.count(kind) == 0; });
  }
  of_step_.clear();
  passed_over_.clear();
  return in_vain;
}

VariantKeys DueVariants::due_in(int64_t state, bool grad_enabled) {
  VariantKeys found;
  for (const VariantKey& kind : due_) {
    const VariantKey wanted = !grad_enabled || has_met_again(kind) ? kind : kind.in_state(state);
    (wanted.state == state ? found : passed_over_).insert(wanted);
  }
  return found;
}

bool DueVariants::has_met_again(const VariantKey& kind) const {
  if (is_warm_ || !kind.grad) return true;
  const auto steps = steps_.find(kind.family());
  return steps == steps_.end() || steps->second <= 1 || recurring_.count(kind.family()) != 0;
}

void DueVariants::mark_captured(const VariantKeys& kinds) {
  for (const VariantKey& kind : kinds) {
    captured_.insert(kind);
    due_.erase(kind);
    is_warm_ = is_warm_ || kind.grad;
  }
}

void DueVariants::forget_graphs(bool only_training) {
  const auto is_meant = [&](const VariantKey& kind) { return kind.grad || !only_training; };
  erase_if(captured_, is_meant);
  for (const VariantKey& kind : warmed_up_) {
    if (is_meant(kind)) due_.insert(kind);
  }
}

void DueVariants::forget_states(const std::set<int64_t>& states) {
  for (VariantKeys* keys : {&captured_, &due_, &warmed_up_, &cold_}) {
    erase_if(*keys, [&](const VariantKey& kind) { return states.count(kind.state) != 0; });
  }
}

void DueVariants::forget_tables() {
  for (VariantKeys* keys : {&of_step_, &due_, &warmed_up_, &cold_}) {
    erase_if(*keys, [](const VariantKey& kind) { return !kind.by_token; });
  }
}

VariantKeys DueVariants::captured_of_family(const VariantKey& kind) const {
  VariantKeys found;
  for (const VariantKey& other : captured_) {
    if (other.family() == kind.family()) found.insert(other);
  }
  return found;
}

std::set<int64_t> DueVariants::states_with_graphs() const {
  std::set<int64_t> found;
  for (const VariantKey& kind : captured_) found.insert(kind.state);
  return found;
}

}  // namespace megagraph
