// SPDX-License-Identifier: Apache-2.0
#include "csrc/torch/pass_memory.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "csrc/torch/attempt.h"

namespace megagraph {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using c10::CachingDeviceAllocator::TraceEntry;

// torch's allocator: blocks are multiples of the first, up to the second share small segments, and
// up to the third such of twice as much.
constexpr size_t kBlockBytes = 512, kSmallBytes = 1 << 20, kOwnSegmentBytes = 10 << 20;

// Taken under the allocator's lock, and nothing is taken under it.
std::mutex watched_mutex;
std::atomic<PassWatch*> watched{nullptr};

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) {
    return status == cudaStreamCaptureStatusActive;
  }
  static_cast<void>(cudaGetLastError());
  return false;
}

}  // namespace

size_t PassMemory::bytes_of(Kind kind) const {
  size_t bytes = 0;
  for (const Allocation& it : allocations) {
    if (it.kind != kind || it.bytes <= kSmallBytes) continue;
    bytes += (it.bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  }
  return bytes;
}

void reserve(c10::DeviceIndex device, c10::MempoolId_t pool, size_t bytes) {
  if (bytes == 0) return;
  bytes = std::max(bytes, kOwnSegmentBytes);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  allocator::beginAllocateToPool(device, pool, [stream](cudaStream_t of) { return of == stream; });
  void* block = nullptr;
  const bool is_there = attempt([&] { block = allocator::raw_alloc_with_stream(bytes, stream); });
  allocator::endAllocateToPool(device, pool);
  if (is_there) allocator::raw_delete(block);
  allocator::releasePool(device, pool);
  TORCH_CHECK_WITH(OutOfMemoryError, is_there, "a slot's pool needs ", bytes, " bytes");
}

PassWatch::PassWatch(c10::DeviceIndex device, c10::MempoolId_t pool, c10::MempoolId_t scratch,
                     c10::MempoolId_t lent, std::shared_ptr<PassMemory> memory)
    : device_(device),
      pool_(pool),
      scratch_(scratch),
      lent_(lent),
      memory_(std::move(memory)),
      is_learning_(!memory_->is_known) {}

PassWatch::~PassWatch() { abort(); }

void PassWatch::begin() {
  static std::once_flag attached;
  std::call_once(attached, [] { allocator::attachAllocatorTraceTracker(&PassWatch::see_any); });
  {
    const std::lock_guard<std::mutex> lock(watched_mutex);
    TORCH_CHECK(watched.load() == nullptr, "another capture is being watched");
    watched.store(this);
    is_watching_ = true;
  }
  if (is_learning_) return;
  // In place of the capture's own routing, which would take all; its end ends that of `pool_`.
  allocator::endAllocateToPool(device_, pool_);
  is_routing_ = true;
  const auto route_to = [this](c10::MempoolId_t pool) {
    allocator::beginAllocateToPool(device_, pool, [this, pool](cudaStream_t stream) {
      return is_capturing(stream) && pool_of_next() == pool;
    });
  };
  route_to(pool_);
  route_to(scratch_);
  if (lent_ != pool_) route_to(lent_);
}

c10::MempoolId_t PassWatch::pool_of_next() const {
  if (is_other_ || seen_.size() >= memory_->allocations.size()) return pool_;
  switch (memory_->allocations[seen_.size()].kind) {
    case PassMemory::Kind::kTemporary:
      return scratch_;
    case PassMemory::Kind::kGivenBack:
      return lent_;
    case PassMemory::Kind::kKept:
      break;
  }
  return pool_;
}

void PassWatch::see_any(const TraceEntry& entry) {
  if (watched.load(std::memory_order_relaxed) == nullptr) return;
  const std::lock_guard<std::mutex> lock(watched_mutex);
  if (PassWatch* watch = watched.load()) watch->see(entry);
}

void PassWatch::see(const TraceEntry& entry) {
  if (entry.device_ != device_) return;
  if (entry.action_ == TraceEntry::ALLOC) {
    const c10::MempoolId_t pool = entry.mempool_;
    if (is_over_ || (pool != scratch_ && pool != pool_ && pool != lent_)) return;
    const size_t index = seen_.size();
    seen_.push_back({entry.size_, PassMemory::Kind::kKept});
    live_[entry.addr_] = {index, pool};
    const auto& known = memory_->allocations;
    if (!is_learning_ && (index >= known.size() || known[index].bytes != entry.size_)) {
      is_other_ = true;
    }
  } else if (entry.action_ == TraceEntry::FREE_COMPLETED) {
    const auto found = live_.find(entry.addr_);
    if (found == live_.end()) return;
    if (!is_over_) {
      seen_[found->second.index].kind = PassMemory::Kind::kTemporary;
    } else if (is_learning_) {
      memory_->allocations[found->second.index].kind = PassMemory::Kind::kGivenBack;
    }
    live_.erase(found);
  }
}

size_t PassWatch::num_live_in(c10::MempoolId_t pool) const {
  return std::count_if(live_.begin(), live_.end(),
                       [pool](const auto& it) { return it.second.pool == pool; });
}

void PassWatch::end() {
  stop_routing();
  const std::lock_guard<std::mutex> lock(watched_mutex);
  is_over_ = true;
  if (is_learning_) {
    memory_->allocations = std::move(seen_);
    memory_->is_known = true;
  }
  const size_t held = num_live_in(scratch_);
  TORCH_CHECK(held == 0, held,
              " allocations outlive their pass in one slot, and did not in another");
}

void PassWatch::close() {
  stop();
  const size_t held = lent_ == pool_ ? 0 : num_live_in(lent_);
  TORCH_CHECK(held == 0, held,
              " allocations were given back behind their pass in one slot, and not in another");
}

void PassWatch::abort() noexcept { stop(); }

void PassWatch::stop() noexcept {
  if (is_watching_) {
    is_watching_ = false;
    const std::lock_guard<std::mutex> lock(watched_mutex);
    watched.store(nullptr);
  }
  stop_routing();
}

void PassWatch::stop_routing() noexcept {
  if (!is_routing_) return;
  is_routing_ = false;
  attempt([&] { allocator::endAllocateToPool(device_, scratch_); });
  attempt([&] { allocator::releasePool(device_, scratch_); });
  if (lent_ != pool_) {
    attempt([&] { allocator::endAllocateToPool(device_, lent_); });
    attempt([&] { allocator::releasePool(device_, lent_); });
  }
  attempt([&] { allocator::releasePool(device_, pool_); });  // which was taken twice
}

}  // namespace megagraph
