// SPDX-License-Identifier: Apache-2.0
// References to a private memory pool, which is two: of device memory and of pinned memory; and
// loans of it to work that is not captured. For CUDA builds.
//
// No release from 2.11 to 2.15 differs: beginning to route to a pool takes a reference, and so does
// createOrIncrefPool() of device memory; ending to route gives none back, only a release does.
//
// Note [Lent memory]
// What a pool's graphs allocated is free once they are captured, as torch's allocator sees it: only
// replays write there. A note taken in the middle of the captures (PoolNote) knows which blocks
// were taken then. While a loan lasts these are taken again, by nobody, so that eager work gets the
// others alone: it writes over no replay that is still to be used. Blocks belong to the stream they
// were made on, so that the work has to run there.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstddef>
#include <memory>

namespace megagraph {

// Keeps a private memory pool from being returned to the driver, also while no graph uses it.
class PoolHold {
 public:
  PoolHold(c10::DeviceIndex device, c10::MempoolId_t pool);
  ~PoolHold();
  PoolHold(const PoolHold&) = delete;
  PoolHold& operator=(const PoolHold&) = delete;

  c10::DeviceIndex device() const { return device_; }
  c10::MempoolId_t pool() const { return pool_; }

 private:
  const c10::DeviceIndex device_;
  const c10::MempoolId_t pool_;
};

// For a graph that was capturing into the pool and will not end it by itself: no allocator routes
// to the pool any more, and its references are given back. `has_begun` says that the capture began,
// since when there is one in each allocator, also where the routing has ended meanwhile. Without
// it, an allocator has taken one if, and only if, it still routes.
void end_routing_to(c10::DeviceIndex device, c10::MempoolId_t pool, bool has_begun) noexcept;

// Which blocks of a pool are taken.
struct PoolNote {
  std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> state;
};

PoolNote take_note(c10::DeviceIndex device, c10::MempoolId_t pool);

// Bytes of all segments of a pool, and of what somebody holds there or another stream may still
// read. Not to be asked by torch.cuda.memory_snapshot(pool), which drops references that are not
// its own (pytorch#196366).
size_t held_bytes(c10::MempoolId_t pool);
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
