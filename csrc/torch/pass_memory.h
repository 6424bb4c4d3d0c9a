// SPDX-License-Identifier: Apache-2.0
// Sends what a captured pass allocates and frees again to memory that all passes share. For CUDA
// builds.
//
// Note [Scratch]
// With several slots each has a pool of its own, since what one micro-batch keeps for its backward
// outlives the next one's forward. Most of what a pass allocates is gone when it ends, though: no
// replay reads it later, and no two graphs of a device run at the same time
// (csrc/bank/replay/launch.h, Note [One stream after another]). So a pass is captured once to see
// which of its allocations are gone at its end (PassMemory), and then once for each slot, where
// these come from a pool that all slots of all banks of the device share. Kept memory is thus paid
// for each slot, and temporary memory once.
//
// What a pass hands over to something eager, or is handed, is gone before the next pass of its
// slot. If sites have pools of their own (csrc/bank/replay/slot_ring.h, Note [Facing slots]), it
// comes from another pool, in which later passes use that memory again.
//
// Kept memory is taken as one block before the first pass (reserve()). Block by block torch would
// take segments of 20 MiB for what is smaller than 10 MiB, of which the rest of each would be lost
// in every slot.
//
// A capture that allocates otherwise than the first one did loses nothing: from there on all comes
// from the slot's own pool. Where something in the shared pool outlives the pass, end() throws.
//
// Which allocation is next is counted by torch's own trace of its allocator, after each of them, so
// that the filters which choose the pool may be asked at any time, as often as torch likes and in
// any order: releases differ in that. The trace has no end; while nothing is watched, an entry
// costs a read of one pointer.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace megagraph {

// What one pass allocates, in order.
struct PassMemory {
  enum class Kind : uint8_t {
    kKept,
    kGivenBack,  // gone before the next pass
    kTemporary,  // gone when the pass ended
  };
  struct Allocation {
    size_t bytes;
    Kind kind;
  };
  bool is_known = false;
  std::vector<Allocation> allocations;

  // Of each kind, as far as it lies in blocks of its own.
  size_t bytes_of(Kind kind) const;
};

// Has a pool hold one free block of so many bytes for the current stream, at least.
void reserve(c10::DeviceIndex device, c10::MempoolId_t pool, size_t bytes);

// Watches one capture; one at a time in a process. What is not known yet, it learns.
class PassWatch {
 public:
  // `pool`: that to which the capture routes. `scratch`: a pool that somebody holds. `lent`:
  // another one, for what is given back, or `pool`.
  PassWatch(c10::DeviceIndex device, c10::MempoolId_t pool, c10::MempoolId_t scratch,
            c10::MempoolId_t lent, std::shared_ptr<PassMemory> memory);
  ~PassWatch();
  PassWatch(const PassWatch&) = delete;
  PassWatch& operator=(const PassWatch&) = delete;

  // Once the capture has begun.
  void begin();
  // Before it ends. Throws where something that was to be temporary is still held.
  void end();
  // Once all is gone that is given back, until when it watches. Throws where some of it, as it was
  // learned, is still held in another pool.
  void close();
  // Ends what began, and learns nothing more.
  void abort() noexcept;

 private:
  static void see_any(const c10::CachingDeviceAllocator::TraceEntry& entry);
  void see(const c10::CachingDeviceAllocator::TraceEntry& entry);
  c10::MempoolId_t pool_of_next() const;
  void stop_routing() noexcept;
  void stop() noexcept;

  const c10::DeviceIndex device_;
  const c10::MempoolId_t pool_, scratch_, lent_;
  const std::shared_ptr<PassMemory> memory_;
  std::vector<PassMemory::Allocation> seen_;
  struct Live {
    size_t index;  // in seen_
    c10::MempoolId_t pool;
  };
  size_t num_live_in(c10::MempoolId_t pool) const;
  std::unordered_map<size_t, Live> live_;  // by address
  const bool is_learning_;
  bool is_other_ = false;  // than the pass that is known
  bool is_watching_ = false, is_routing_ = false, is_over_ = false;
};

}  // namespace megagraph
