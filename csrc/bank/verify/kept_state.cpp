// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/verify/kept_state.h"

#include <map>

#include "csrc/bank/verify/runs.h"
#include "csrc/torch/version_counter.h"

namespace megagraph {
namespace {

// Subclasses that stand for other tensors have no memory of their own.
bool lies_as(const at::Tensor& tensor, const at::Tensor& alias) {
  if (!tensor.has_storage() || tensor.layout() != at::kStrided ||
      tensor.key_set().has(c10::DispatchKey::Python)) {
    return true;
  }
  return tensor.is_alias_of(alias) && tensor.storage_offset() == alias.storage_offset() &&
         tensor.scalar_type() == alias.scalar_type() && tensor.sizes() == alias.sizes() &&
         tensor.strides() == alias.strides();
}

}  // namespace

KeptState::KeptState(const std::vector<NamedTensors>& of_sites,
                     const std::vector<at::Tensor>& further, const NamedTensors& placed) {
  std::map<const void*, size_t> places;  // each tensor is kept once
  const auto keep = [&](const at::Tensor& tensor, const std::string& name) {
    const auto [found, is_new] = places.try_emplace(tensor.unsafeGetTensorImpl(), kept_.size());
    if (is_new) {
      const at::Tensor live = tensor.detach();
      kept_.push_back({tensor, live, live.clone(), name});
    }
    return found->second;
  };
  for (const at::Tensor& tensor : further) keep(tensor, "what a graph reads");
  for (const NamedTensors& written : of_sites) {
    auto& own = of_sites_.emplace_back();
    for (const auto& [name, tensor] : written) own.emplace_back(name, keep(tensor, name));
  }
  for (const auto& [name, tensor] : placed) {
    placed_.push_back({tensor, tensor.detach(), at::Tensor(), name});
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
    const Kept& kept = kept_[place];
    const bool is_same = have_same_bits(kept.live, kept.before);
    found.emplace_back(name, is_same ? kept.before : kept.live.clone());
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

std::string KeptState::put_all_back() const {
  std::string moved;
  for (const auto* all : {&kept_, &placed_}) {
    for (const Kept& kept : *all) {
      if (lies_as(kept.tensor, kept.live)) continue;
      kept.tensor.set_data(kept.live);
      if (moved.empty()) moved = kept.name;
    }
  }
  for (const Kept& kept : kept_) copy_unnoticed(kept.live, kept.before);
  return moved;
}

}  // namespace megagraph
