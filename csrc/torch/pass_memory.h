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
// A backward frees what its forward kept. Where that lies in a pool of its own, which the two slots
// share that are never in it at once, what is temporary in the rest of the backward lies there as
// far as there is room; as eager has it, whose peak would else be lower.
//
// Memory is taken as one block a pool before the first pass (SlotMemory::needs(), reserve()). Block
// by block torch would take segments of 20 MiB for what is smaller than 10 MiB, of which the rest
// of each would be lost in every slot; and of temporary memory segments that no other pass fills.
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

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
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
  struct Free {
    size_t num_before;            // allocations
    std::optional<size_t> index;  // of what it frees; none for what an earlier pass has allocated
    size_t bytes;
  };
  bool is_known = false;
  std::vector<Allocation> allocations;
  std::vector<Free> frees;

  // Of each kind, as far as it lies in blocks of its own.
  size_t bytes_of(Kind kind) const;
  // The most of what is temporary at once, likewise, that does not lie in what the pass has freed.
  size_t most_temporary(bool uses_freed) const;
};

// What the passes of a slot allocate: of each site its forward, its backward and what finishes it,
// numbered in this order. Pools are named by number.
class SlotMemory {
 public:
  std::shared_ptr<PassMemory> of(int site, int pass);
  bool is_known() const { return !passes_.empty(); }

  // What each pool needs if these are captured: `own` of a slot, `lent`, by site that which its
  // forward keeps things in, and `scratch`. Later backwards find room where the first one's site
  // had its memory.
  std::map<int, size_t> needs(int own, int lent, const std::vector<int>& kept_in,
                              int scratch) const;

 private:
  std::map<int, std::array<std::shared_ptr<PassMemory>, 3>> passes_;
};

// Those of a pass; some may be the same.
struct PassPools {
  c10::MempoolId_t own;    // the capture routes to it
  c10::MempoolId_t lent;   // of what is given back
  c10::MempoolId_t freed;  // in which it frees what its forward kept, and may use it again
};

// Has a pool hold one free block of so many bytes for the current stream, at least.
void reserve(c10::DeviceIndex device, c10::MempoolId_t pool, size_t bytes);

// Memory that was freed, by address.
class FreedRanges {
 public:
  void add(size_t address, size_t bytes);
  void take(size_t address, size_t bytes);  // as far as it is there
  bool has_room(size_t bytes) const;        // for so much, in one

 private:
  std::map<size_t, size_t> end_of_;  // by where it begins
};

// Watches one capture; one at a time in a process. What is not known yet, it learns.
class PassWatch {
 public:
  // `scratch`: a further pool. Somebody holds each of them.
  PassWatch(c10::DeviceIndex device, const PassPools& pools, c10::MempoolId_t scratch,
            std::shared_ptr<PassMemory> memory);
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
  bool has_other(c10::MempoolId_t pool) const { return pool != pools_.own; }
  void stop_routing() noexcept;
  void stop() noexcept;

  const c10::DeviceIndex device_;
  const PassPools pools_;
  const c10::MempoolId_t scratch_;
  const std::shared_ptr<PassMemory> memory_;
  std::vector<PassMemory::Allocation> seen_;
  std::vector<PassMemory::Free> frees_;  // while it learns
  struct Live {
    size_t index;  // in seen_
    c10::MempoolId_t pool;
  };
  size_t num_live_in(c10::MempoolId_t pool) const;
  std::unordered_map<size_t, Live> live_;  // by address
  FreedRanges room_;                       // in the pool `freed`, if it is another one
  const bool is_learning_;
  bool is_other_ = false;  // than the pass that is known
  bool is_watching_ = false, is_routing_ = false, is_over_ = false;
};

}  // namespace megagraph
