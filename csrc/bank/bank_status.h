// SPDX-License-Identifier: Apache-2.0
// The state and the counters of one bank, which pending backward passes read.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

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

// Whether one backward made gradients of several micro-batches. Eager adds up what they give a
// parameter, and that to main_grad; each graph adds its own part.
class SharedBackwards {
 public:
  // On any thread, in a backward. `micro_batch`: no other one has this number meanwhile.
  void note(int backward, int64_t micro_batch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_met_one_ = has_met_one_ || (backward == backward_ && micro_batch != micro_batch_);
    backward_ = backward;
    micro_batch_ = micro_batch;
  }
  bool has_met_one() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return has_met_one_;
  }

 private:
  mutable std::mutex mutex_;
  int backward_ = -1;
  int64_t micro_batch_ = 0;
  bool has_met_one_ = false;
};

// Lives as long as any of its readers.
struct BankStatus {
  std::atomic<BankState> state{BankState::kWarmUp};
  std::atomic<int> passes{0};  // that run, on any thread
  Counters counters;
  SharedBackwards shared_backwards;
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
