// SPDX-License-Identifier: Apache-2.0
#include "csrc/torch/graph_pool.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "csrc/torch/attempt.h"

namespace megagraph {
namespace {

at::HostAllocator* host_allocator() { return at::getHostAllocator(at::kCUDA); }

}  // namespace

PoolHold::PoolHold(c10::DeviceIndex device, c10::MempoolId_t pool) : device_(device), pool_(pool) {
  c10::cuda::CUDACachingAllocator::createOrIncrefPool(device_, pool_);
  // Pinned memory has a pool of the same name. It can be taken only by routing to it for a moment,
  // and a capture into one that was given up fails (an internal assertion of torch 2.11).
  host_allocator()->begin_allocate_to_pool(pool_, [](c10::Stream) { return false; });
  host_allocator()->end_allocate_to_pool(pool_);
}

PoolHold::~PoolHold() {
  attempt([&] { host_allocator()->release_pool(pool_); });
  attempt([&] { c10::cuda::CUDACachingAllocator::releasePool(device_, pool_); });
}

void end_routing_to(c10::DeviceIndex device, c10::MempoolId_t pool, bool has_begun) noexcept {
  using namespace c10::cuda::CUDACachingAllocator;
  if (attempt([&] { endAllocateToPool(device, pool); }) || has_begun) {
    attempt([&] { releasePool(device, pool); });
  }
  if (attempt([&] { host_allocator()->end_allocate_to_pool(pool); }) || has_begun) {
    attempt([&] { host_allocator()->release_pool(pool); });
  }
}

}  // namespace megagraph
