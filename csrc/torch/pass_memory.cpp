// SPDX-License-Identifier: Apache-2.0
#include "csrc/torch/pass_memory.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <iterator>
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

size_t block_of(size_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

}  // namespace

size_t PassMemory::bytes_of(Kind kind) const {
  size_t bytes = 0;
  for (const Allocation& it : allocations) {
    if (it.kind == kind && it.bytes > kSmallBytes) bytes += block_of(it.bytes);
  }
  return bytes;
}

size_t PassMemory::most_temporary(bool uses_freed) const {
  size_t room = 0, used = 0, most = 0, done = 0;
  std::vector<bool> lies_in_freed(allocations.size());
  const auto allocate_before = [&](size_t end) {
    for (; done < end; ++done) {
      const auto& [bytes, kind] = allocations[done];
      if (kind != Kind::kTemporary || bytes <= kSmallBytes) continue;
      lies_in_freed[done] = room >= block_of(bytes);
      if (lies_in_freed[done]) {
        room -= block_of(bytes);
      } else {
        used += block_of(bytes);
      }
      most = std::max(most, used);
    }
  };
  for (const Free& it : frees) {
    if (it.bytes <= kSmallBytes) continue;
    allocate_before(it.num_before);
    const bool is_temporary = it.index && allocations[*it.index].kind == Kind::kTemporary;
    if (is_temporary && !lies_in_freed[*it.index]) {
      used -= block_of(it.bytes);
    } else if (is_temporary || (!it.index && uses_freed)) {
      room += block_of(it.bytes);
    }
  }
  return most;
}

std::shared_ptr<PassMemory> SlotMemory::of(int site, int pass) {
  auto& memory = passes_[site].at(pass);
  if (memory == nullptr) memory = std::make_shared<PassMemory>();
  return memory;
}

std::map<int, size_t> SlotMemory::needs(int own, int lent, const std::vector<int>& kept_in,
                                        int scratch) const {
  using Kind = PassMemory::Kind;
  std::map<int, size_t> most, needs;
  for (const auto& [site, passes] : passes_) {
    std::map<int, size_t> behind;
    for (size_t pass = 0; pass < passes.size(); ++pass) {
      if (passes[pass] == nullptr) continue;
      const PassMemory& memory = *passes[pass];
      const size_t temporary = memory.most_temporary(pass > 0 && kept_in[site] != own);
      needs[scratch] = std::max(needs[scratch], temporary);
      if (pass == 0) continue;
      behind[own] += memory.bytes_of(Kind::kKept);
      behind[lent] += memory.bytes_of(Kind::kGivenBack);
    }
    for (const auto& [pool, bytes] : behind) most[pool] = std::max(most[pool], bytes);
  }
  for (const auto& [pool, bytes] : most) needs[pool] += bytes;
  for (const auto& [site, passes] : passes_) {
    if (passes[0] == nullptr) continue;
    const size_t given = passes[0]->bytes_of(Kind::kGivenBack);
    needs[kept_in[site]] += passes[0]->bytes_of(Kind::kKept);
    // Where it is another pool, gradients lie there later.
    needs[lent] = kept_in[site] == lent ? needs[lent] + given : std::max(needs[lent], given);
  }
  return needs;
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

void FreedRanges::add(size_t address, size_t bytes) {
  size_t end = address + bytes;
  auto next = end_of_.lower_bound(address);
  if (next != end_of_.end() && next->first == end) {
    end = next->second;
    next = end_of_.erase(next);
  }
  if (next != end_of_.begin() && std::prev(next)->second == address) {
    std::prev(next)->second = end;
  } else {
    end_of_.emplace(address, end);
  }
}

void FreedRanges::take(size_t address, size_t bytes) {
  const size_t end = address + bytes;
  auto it = end_of_.upper_bound(address);
  if (it != end_of_.begin()) --it;
  while (it != end_of_.end() && it->first < end) {
    const auto [from, to] = *it;
    if (to <= address) {
      ++it;
      continue;
    }
    it = end_of_.erase(it);
    if (from < address) end_of_.emplace(from, address);
    if (to > end) it = end_of_.emplace(end, to).first;
  }
}

bool FreedRanges::has_room(size_t bytes) const {
  return std::any_of(end_of_.begin(), end_of_.end(),
                     [bytes](const auto& it) { return it.second - it.first >= bytes; });
}

PassWatch::PassWatch(c10::DeviceIndex device, const PassPools& pools, c10::MempoolId_t scratch,
                     std::shared_ptr<PassMemory> memory)
    : device_(device),
      pools_(pools),
      scratch_(scratch),
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
  // In place of the capture's own routing, which would take all; its end ends that of `own`.
  allocator::endAllocateToPool(device_, pools_.own);
  is_routing_ = true;
  const auto route_to = [this](c10::MempoolId_t pool) {
    allocator::beginAllocateToPool(device_, pool, [this, pool](cudaStream_t stream) {
      return is_capturing(stream) && pool_of_next() == pool;
    });
  };
  route_to(pools_.own);
  route_to(scratch_);
  if (has_other(pools_.lent)) route_to(pools_.lent);
  if (has_other(pools_.freed)) route_to(pools_.freed);
}

c10::MempoolId_t PassWatch::pool_of_next() const {
  if (is_other_ || seen_.size() >= memory_->allocations.size()) return pools_.own;
  const PassMemory::Allocation& next = memory_->allocations[seen_.size()];
  switch (next.kind) {
    case PassMemory::Kind::kTemporary:
      // What is small would take a segment of its own there.
      return next.bytes > kSmallBytes && room_.has_room(block_of(next.bytes)) ? pools_.freed
                                                                              : scratch_;
    case PassMemory::Kind::kGivenBack:
      return pools_.lent;
    case PassMemory::Kind::kKept:
      break;
  }
  return pools_.own;
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
    const auto& [own, lent, freed] = pools_;
    if (is_over_ || (pool != scratch_ && pool != own && pool != lent && pool != freed)) return;
    if (pool == freed) room_.take(entry.addr_, block_of(entry.size_));
    const size_t index = seen_.size();
    seen_.push_back({entry.size_, PassMemory::Kind::kKept});
    live_[entry.addr_] = {index, pool};
    const auto& known = memory_->allocations;
    if (!is_learning_ && (index >= known.size() || known[index].bytes != entry.size_)) {
      is_other_ = true;
    }
  } else if (entry.action_ == TraceEntry::FREE_COMPLETED) {
    if (has_other(pools_.freed) && entry.mempool_ == pools_.freed && entry.size_ > kSmallBytes) {
      room_.add(entry.addr_, block_of(entry.size_));
    }
    const auto found = live_.find(entry.addr_);
    if (is_learning_ && !is_over_ && (found != live_.end() || entry.mempool_ == pools_.own)) {
      std::optional<size_t> index;
      if (found != live_.end()) index = found->second.index;
      frees_.push_back({seen_.size(), index, entry.size_});
    }
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
  if (!has_other(pool)) return 0;
  return std::count_if(live_.begin(), live_.end(),
                       [pool](const auto& it) { return it.second.pool == pool; });
}

void PassWatch::end() {
  stop_routing();
  const std::lock_guard<std::mutex> lock(watched_mutex);
  is_over_ = true;
  if (is_learning_) {
    memory_->allocations = std::move(seen_);
    memory_->frees = std::move(frees_);
    memory_->is_known = true;
  }
  const size_t held = num_live_in(scratch_) + num_live_in(pools_.freed);
  TORCH_CHECK(held == 0, held,
              " allocations outlive their pass in one slot, and did not in another");
}

void PassWatch::close() {
  stop();
  const size_t held = num_live_in(pools_.lent);
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
  for (const c10::MempoolId_t& other : {pools_.lent, pools_.freed}) {
    if (!has_other(other)) continue;
    attempt([&] { allocator::endAllocateToPool(device_, other); });
    attempt([&] { allocator::releasePool(device_, other); });
  }
  attempt([&] { allocator::releasePool(device_, pools_.own); });  // which was taken twice
}

}  // namespace megagraph
