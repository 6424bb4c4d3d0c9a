// SPDX-License-Identifier: Apache-2.0
// The state and the counters of one bank, which pending backward passes read.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "csrc/bank/shared_gradients.h"
#include "csrc/decide/eager_reason.h"

namespace megagraph {

enum class BankState : uint8_t { kWarmUp, kCapturing, kSealed, kReleased };
inline constexpr std::array<const char*, 4> kBankStateNames = {"warm-up", "capturing", "sealed",
                                                               "released"};

// At any moment replays + sum(eager) == calls. A call is one site's turn in one micro-batch.
struct Counters {
  std::atomic<int64_t> calls{0}, replays{0};
  std::array<std::atomic<int64_t>, kEagerReasonNames.size()> eager{};

  void add(const Counters& others) {
    calls += others.calls;
    replays += others.replays;
    for (size_t i = 0; i < eager.size(); ++i) eager[i] += others.eager[i];
  }
  void count_replays(int64_t calls_made) {
    calls.fetch_add(calls_made, std::memory_order_relaxed);
    replays.fetch_add(calls_made, std::memory_order_relaxed);
  }
  void count_eager(EagerReason reason, int64_t calls_made) {
    calls.fetch_add(calls_made, std::memory_order_relaxed);
    eager[static_cast<size_t>(reason)].fetch_add(calls_made, std::memory_order_relaxed);
  }
};

// Lives as long as any of its readers.
struct BankStatus {
  std::atomic<BankState> state{BankState::kWarmUp};
  std::atomic<int> passes{0};  // that run, on any thread
  Counters counters;
  SharedGradients shared_gradients;
};

// A pass of graphs that runs: meanwhile nobody releases them.
class RunningPass {
 public:
  explicit RunningPass(std::shared_ptr<BankStatus> status) : status_(std::move(status)) {
    ++status_->passes;
  }
  ~RunningPass() { --status_->passes; }
  RunningPass(const RunningPass&) = delete;
  RunningPass& operator=(const RunningPass&) = delete;

 private:
  const std::shared_ptr<BankStatus> status_;
};

}  // namespace megagraph
