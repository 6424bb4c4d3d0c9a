// SPDX-License-Identifier: Apache-2.0
// The life and the counters of one bank: all graphs of one model.
//
// Note [Life of a bank]
// warm-up -> capturing -> sealed <-> suspended -> released. A sealed bank may capture further
// variants between steps (sealed -> capturing -> sealed). It is append-only until it is released:
// freeing one graph of a living bank would free a cuBLAS workspace that others use, so everything
// goes at once.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/bank/eager_reason.h"

namespace megagraph {

class Chunk;

enum class BankState : uint8_t { kWarmUp, kCapturing, kSealed, kSuspended, kReleased };
inline constexpr std::array<const char*, 5> kBankStateNames = {"warm-up", "capturing", "sealed",
                                                               "suspended", "released"};

// At any moment replays + sum(eager) == calls. A call is one site's turn in one micro-batch.
struct Counters {
  std::atomic<int64_t> calls{0}, replays{0};
  std::array<std::atomic<int64_t>, kEagerReasonNames.size()> eager{};

  void count_replays(int64_t calls_made) {
    calls.fetch_add(calls_made, std::memory_order_relaxed);
    replays.fetch_add(calls_made, std::memory_order_relaxed);
  }
  void count_eager(EagerReason reason, int64_t calls_made) {
    calls.fetch_add(calls_made, std::memory_order_relaxed);
    eager[static_cast<size_t>(reason)].fetch_add(calls_made, std::memory_order_relaxed);
  }
};

// What chunks and pending backward passes read of their bank; lives as long as any of them.
struct BankStatus {
  std::atomic<BankState> state{BankState::kWarmUp};
  Counters counters;
};

class GraphBank {
 public:
  explicit GraphBank(c10::Device device);
  ~GraphBank();
  GraphBank(const GraphBank&) = delete;
  GraphBank& operator=(const GraphBank&) = delete;

  c10::Device device() const { return device_; }
  BankState state() const { return status_->state.load(); }
  // Throws where Note [Life of a bank] does not allow the step.
  void become(BankState next);
  Counters& counters() { return status_->counters; }

  std::shared_ptr<Chunk> add_chunk(int num_sites);

  // Drops every graph. Backward passes that are still pending raise from now on. The caller has
  // waited for the device.
  void release();

 private:
  const c10::Device device_;
  const std::shared_ptr<BankStatus> status_;
  std::vector<std::shared_ptr<Chunk>> chunks_;
};

}  // namespace megagraph
