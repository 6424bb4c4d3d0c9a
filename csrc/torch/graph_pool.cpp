// SPDX-License-Identifier: Apache-2.0
#include "csrc/torch/graph_pool.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "csrc/torch/attempt.h"

namespace megagraph {

namespace allocator = c10::cuda::CUDACachingAllocator;

namespace {

at::HostAllocator* host_allocator() { return at::getHostAllocator(at::kCUDA); }

auto segments_of(c10::MempoolId_t pool) {
  return allocator::snapshot(pool, /*include_traces=*/false).segments;
}

}  // namespace

PoolHold::PoolHold(c10::DeviceIndex device, c10::MempoolId_t pool) : device_(device), pool_(pool) {
  allocator::createOrIncrefPool(device_, pool_);
  // Pinned memory has a pool of the same name. It can be taken only by routing to it for a moment,
  // and a capture into one that was given up fails (an internal assertion of torch 2.11).
  host_allocator()->begin_allocate_to_pool(pool_, [](c10::Stream) { return false; });
  host_allocator()->end_allocate_to_pool(pool_);
}

PoolHold::~PoolHold() {
  attempt([&] { host_allocator()->release_pool(pool_); });
  attempt([&] { allocator::releasePool(device_, pool_); });
}

void end_routing_to(c10::DeviceIndex device, c10::MempoolId_t pool, bool has_begun) noexcept {
  if (attempt([&] { allocator::endAllocateToPool(device, pool); }) || has_begun) {
    attempt([&] { allocator::releasePool(device, pool); });
  }
  if (attempt([&] { host_allocator()->end_allocate_to_pool(pool); }) || has_begun) {
    attempt([&] { host_allocator()->release_pool(pool); });
  }
}

PoolNote take_note(c10::DeviceIndex device, c10::MempoolId_t pool) {
  return {allocator::getCheckpointState(device, pool)};
}

size_t held_bytes(c10::MempoolId_t pool) {
  size_t bytes = 0;
  for (const auto& segment : segments_of(pool)) bytes += segment.total_size;
  return bytes;
}

size_t taken_bytes(c10::MempoolId_t pool) {
  size_t bytes = 0;
  for (const auto& segment : segments_of(pool)) bytes += segment.active_size;
  return bytes;
}

PoolLoan::PoolLoan(c10::DeviceIndex device, c10::MempoolId_t pool, const PoolNote& note)
    : device_(device), pool_(pool) {
  if (taken_bytes(pool_) != 0) return;
  const PoolNote nothing = take_note(device_, pool_);
  is_open_ = attempt([&] { claims_ = allocator::setCheckpointPoolState(device_, note.state); });
  if (!is_open_) {
    attempt([&] { allocator::setCheckpointPoolState(device_, nothing.state); });  // frees all
  }
}

PoolLoan::~PoolLoan() { close(); }

void PoolLoan::begin() {
  TORCH_CHECK(is_open_ && !is_routing_, "nothing is lent, or it is in use");
  // torch makes those of a thread and a stream with the first matrix product there, and keeps them:
  // in lent memory they would lie where replays write.
  at::cuda::getCurrentCUDABlasHandle();
  at::cuda::getCUDABlasLtWorkspace();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_).stream();
  allocator::beginAllocateToPool(device_, pool_,
                                 [stream](cudaStream_t of) { return of == stream; });
  is_routing_ = true;
}

void PoolLoan::end() noexcept {
  if (!is_routing_) return;
  is_routing_ = false;
  attempt([&] { allocator::endAllocateToPool(device_, pool_); });
  attempt([&] { allocator::releasePool(device_, pool_); });
}

void PoolLoan::close() noexcept {
  end();
  is_open_ = false;
  claims_ = {};
}

}  // namespace megagraph
