// SPDX-License-Identifier: Apache-2.0
// References to a private memory pool, which is two: of device memory and of pinned memory. For
// CUDA builds.
//
// No release from 2.11 to 2.15 differs: beginning to route to a pool takes a reference, and so does
// createOrIncrefPool() of device memory; ending to route gives none back, only a release does.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

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

}  // namespace megagraph
