// SPDX-License-Identifier: Apache-2.0
// Lends memory of a private pool to work that is not captured. For CUDA builds.
//
// Note [Lent memory]
// What a pool's graphs allocated is free once they are captured, as torch's allocator sees it: only
// replays write there. A note taken in the middle of the captures (PoolNote) knows which blocks
// were taken then. While a loan lasts these are taken again, by nobody, so that eager work gets the
// others alone: it writes over no replay that is still to be used. Blocks belong to the stream they
// were made on, so that the work has to run there.
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstddef>
#include <memory>

namespace megagraph {

// Which blocks of a pool are taken.
struct PoolNote {
  std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> state;
};

PoolNote take_note(c10::DeviceIndex device, c10::MempoolId_t pool);

// Bytes of a pool that somebody holds, or that another stream may still read.
size_t taken_bytes(c10::MempoolId_t pool);

class PoolLoan {
 public:
  // Lends what was free when the note was taken; nothing where something in the pool is taken now.
  // `note` must be of this pool.
  PoolLoan(c10::DeviceIndex device, c10::MempoolId_t pool, const PoolNote& note);
  ~PoolLoan();
  PoolLoan(const PoolLoan&) = delete;
  PoolLoan& operator=(const PoolLoan&) = delete;

  bool is_open() const { return is_open_; }

  // Between these two, allocations on the current stream come from the pool.
  void begin();
  void end() noexcept;

  // Ends the loan.
  void close() noexcept;

 private:
  const c10::DeviceIndex device_;
  const c10::MempoolId_t pool_;
  bool is_open_ = false, is_routing_ = false;
  c10::cuda::CUDACachingAllocator::CheckpointDelta claims_;  // frees them when it goes
};

}  // namespace megagraph
