// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/replay/graph_bank.h"

#include <c10/util/Exception.h>

#ifdef MEGAGRAPH_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "csrc/torch/capture_status.h"
#endif

namespace megagraph {
namespace {

bool may_become(BankState from, BankState to) {
  switch (from) {
    case BankState::kWarmUp:
      return to == BankState::kCapturing || to == BankState::kReleased;
    case BankState::kCapturing:
      return to == BankState::kSealed || to == BankState::kReleased;
    case BankState::kSealed:
      return to == BankState::kCapturing || to == BankState::kSuspended ||
             to == BankState::kReleased;
    case BankState::kSuspended:
      return to == BankState::kSealed || to == BankState::kReleased;
    case BankState::kReleased:
      return to == BankState::kReleased;
  }
  return false;
}

// A bank that nobody released: what staged its last micro-batch may still be about to set grids of
// graphs that were not launched since, which CUDA does not know. Garbage is collected also in the
// middle of a capture, where waiting is forbidden; seen are captures of this thread's stream on the
// bank's device. Who wants to be sure releases the bank.
void wait_for([[maybe_unused]] c10::Device device) noexcept {
#ifdef MEGAGRAPH_WITH_CUDA
  if (!device.is_cuda()) return;
  try {
    const c10::cuda::CUDAGuard guard(device);
    if (!is_capturing()) static_cast<void>(cudaDeviceSynchronize());
  } catch (...) {  // at the end of the process the driver may be gone
  }
#endif
}

const char* name_of(BankState state) { return kBankStateNames[static_cast<size_t>(state)]; }

}  // namespace

GraphBank::GraphBank(c10::Device device)
    : device_(device), status_(std::make_shared<BankStatus>()) {}

GraphBank::~GraphBank() {
  if (state() != BankState::kReleased && !chains_.empty()) wait_for(device_);
  release();
}

void GraphBank::become(BankState next) {
  const BankState now = state();
  TORCH_CHECK(may_become(now, next), "a ", name_of(now), " bank cannot become ", name_of(next));
  status_->state.store(next);
  if (next != BankState::kSealed) return;
  for (const auto& chain : chains_) chain->seal();
}

std::shared_ptr<Chain> GraphBank::add_chain(int num_sites) {
  TORCH_CHECK(state() == BankState::kWarmUp, "chains are added during warm-up, this bank is ",
              name_of(state()));
  chains_.push_back(std::make_shared<Chain>(status_, device_, num_sites));
  return chains_.back();
}

void GraphBank::release() {
  if (state() == BankState::kReleased) return;
  status_->state.store(BankState::kReleased);
  for (const auto& chain : chains_) chain->release();
}

}  // namespace megagraph
