// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/verify/kept_state.h"

#include <map>

#include "csrc/bank/verify/runs.h"
#include "csrc/torch/version_counter.h"

namespace megagraph {

KeptState::KeptState(const std::vector<NamedTensors>& of_sites,
                     const std::vector<at::Tensor>& further) {
  std::map<const void*, size_t> places;  // each tensor is kept once
  const auto keep = [&](const at::Tensor& tensor) {
    const auto [found, is_new] = places.try_emplace(tensor.unsafeGetTensorImpl(), kept_.size());
    if (is_new) {
      const at::Tensor live = tensor.detach();
      kept_.push_back({live, live.clone()});
    }
    return found->second;
  };
  for (const at::Tensor& tensor : further) keep(tensor);
  for (const NamedTensors& written : of_sites) {
    auto& own = of_sites_.emplace_back();
    for (const auto& [name, tensor] : written) own.emplace_back(name, keep(tensor));
  }
}

NamedTensors KeptState::found(size_t site) const {
  NamedTensors found;
  for (const auto& [name, place] : of_sites_.at(site)) found.emplace_back(name, kept_[place].live);
  return found;
}

NamedTensors KeptState::now(size_t site) const {
  NamedTensors found;
  for (const auto& [name, place] : of_sites_.at(site)) {
    const auto& [live, before] = kept_[place];
    found.emplace_back(name, have_same_bits(live, before) ? before : live.clone());
  }
  return found;
}

// Versions stay: a backward that has saved such a tensor finds what its forward has left, or what
// was there before.

void KeptState::put(size_t site) const {
  for (const auto& [name, place] : of_sites_.at(site)) {
    copy_unnoticed(kept_[place].live, kept_[place].before);
  }
}

void KeptState::put(size_t site, const NamedTensors& contents) const {
  const auto& own = of_sites_.at(site);
  for (size_t i = 0; i < own.size(); ++i) {
    copy_unnoticed(kept_[own[i].second].live, contents.at(i).second);
  }
}

void KeptState::put_all_back() const {
  for (const auto& [live, before] : kept_) copy_unnoticed(live, before);
}

}  // namespace megagraph
