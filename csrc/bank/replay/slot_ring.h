// SPDX-License-Identifier: Apache-2.0
// Slots: storage for one in-flight micro-batch of one bank.
//
// Note [Nesting rule]
// All graphs of a slot share one memory pool; beside it slots share another, for what is temporary
// in a pass and needs no rule (csrc/torch/pass_memory.h, Note [Scratch]). They were captured
// forwards in order, then backwards in reverse, so the pool's blocks were handed out like a stack.
// A replay order keeps every saved tensor intact if, with `live` the set of sites between their
// forward and their backward,
//   - a forward of site j runs only when j > max(live),
//   - a backward of site i runs only when i == max(live),
//   - any member may be dropped without a backward,
//   - the variant changes only when live is empty,
// and if nothing that was allocated after a forward, and that somebody may still read, is there
// when it runs: no output of this or a later site, no gradient. tests/bank/test_nesting_rule.py
// checks this against a random allocator. A forward that would break the rule runs eager; a
// backward that would break it raises, since its saved tensors are gone.
//
// Transient outputs, which only what lies between two sites reads, went back to the pool as soon as
// the forward was captured: every later pass may write there. So nobody may hold one when a pass
// runs. What a site behind a gap is given, and the gradients on both sides of a gap, are written
// right before the pass that reads them, and need no rule.
//
// Note [Facing slots]
// Where a schedule runs the forward of one micro-batch beside the backward of the one before, layer
// by layer, a layer's memory is free long before its slot is. So two slots may face each other: of
// `n` layers, what the forward of layer `l` in the one keeps, and hands out, lies where that of
// layer n - l of the other one does, and n + 1 layers take the memory of two slots. What backwards
// keep stays in each slot's own pool, and what is temporary in them lies where they have freed what
// their forward kept. Then a forward runs only if no site of that other layer waits for its
// backward, and nobody holds a tensor of it; else it runs eager (NESTING). A backward needs
// no such rule: as long as it is to come, the forwards of the other slot that would write over what
// it reads do not run. What passes hand over to something eager, or are handed, may lie in one
// memory for both slots: gradients live within one launch, as their copies are made there, and no
// pass of either slot runs while somebody holds a transient output of one.
// tests/bank/test_facing_slots.py checks this.
//
// Note [Other threads]
// A communicator's worker (gloo's) wakes those who wait for it and lets go of what it has sent only
// then. On a busy machine that takes milliseconds, in which the host may have come to the next
// site. So a tensor that is in the way is waited for, up to kPatience: by a backward always, since
// it would raise; by a forward unless somebody keeps such tensors on purpose, or always where
// graphs hold collectives.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace megagraph {

// What a tensor over a boundary buffer is.
enum class LeaseKind : uint8_t { kOutput, kTransient, kGradient };

// For a thread that has no core yet; long, since a wait in vain may end the job, which what
// somebody keeps on purpose does anyway, that much later.
constexpr std::chrono::milliseconds kPatience(2000);

// One slot and, while it is leased, the lease of the micro-batch that owns it. Counts what holds
// the lease: the running micro-batch, sites that wait for their backward, and tensors over boundary
// buffers. Safe to use from the forward thread, autograd threads and destructors; needs no GIL.
class Slot {
 public:
  // `on_free(variant)` runs when the last holder goes, before anyone can lease the slot again, and
  // wherever that is, in destructors too: it must not throw.
  // `keep_alive` lives as long as the slot does: the memory behind the boundary buffers.
  Slot(int index, int num_sites, std::function<void(int variant)> on_free,
       std::shared_ptr<void> keep_alive);
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  int index() const { return index_; }
  // Valid while leased.
  int variant() const { return variant_; }

  // Leases the slot to a micro-batch, which is its first holder. False if somebody still holds it.
  bool lease(int variant, bool training);
  void end_micro_batch();

  // The nesting rule, for a span of sites that follow one another. enter: their forwards; leave:
  // their backwards; both answer whether the rule allows it. Only the last one's output is ever
  // held.
  bool enter(int first, int last);
  bool leave(int first, int last);
  // The node of the span is gone without a backward.
  void drop(int first, int last);
  void node_done(int first, int last);

  // Between the backward of a site and what finishes it, which then tells `finish`, or `lose` if it
  // never will: Note [Third pass] in finish.h. The node of the site is not done before.
  void await_finish(int site);
  void finish(int site);
  void lose(int site);
  // A site that was lost since this was last asked, or -1. Takes no lock.
  int take_lost() { return lost_.load() < 0 ? -1 : lost_.exchange(-1); }
  // The same, or one that is unfinished now, once: nobody then calls it lost.
  int take_unfinished();

  void retain_tensor(int site, LeaseKind kind);
  void release_tensor(int site, LeaseKind kind);
  // Whether the backward of `site` is to come, or somebody may read a tensor of it. Takes no lock.
  bool is_held(int site) const { return holds_[site] > 0; }
  // Whether it is not held, once other threads have had their moment: Note [Other threads]. For a
  // backward that is to come nobody waits.
  bool await_site(int site, std::chrono::milliseconds patience = kPatience);
  // Whether nobody may read a transient output, once other threads have had their moment: Note
  // [Other threads]. Call these without the GIL.
  bool await_transients(std::chrono::milliseconds patience = kPatience);
  // The same where somebody may keep a tensor in each micro-batch, which would then wait in each: a
  // wait in vain is the last one, until a micro-batch has met none in its way.
  bool await_stray_transients();

  bool is_free() const;
  // Whether a backward is still to come.
  bool is_pending() const;
  // "2 tensors of site 3, 1 pending backward of site 4", for errors.
  std::string describe_holders() const;

  // What the gradient listener answered for this lease: asked once.
  bool wants_notice(const std::function<bool()>& ask);

  // No more callbacks: the owner of the buffers is going away.
  void detach();

 private:
  void release_holders(std::unique_lock<std::mutex>& lock, int64_t count = 1);

  const int index_;
  std::function<void(int)> on_free_;
  const std::shared_ptr<void> keep_alive_;
  mutable std::mutex mutex_;
  int variant_ = -1;
  bool training_ = false;
  int64_t holders_ = 0;
  std::vector<int> live_;                             // sites, ascending
  std::vector<int32_t> outputs_, gradients_, nodes_;  // holders by site
  std::vector<std::atomic<int32_t>> holds_;           // of all three kinds together
  int64_t num_gradients_ = 0, num_transients_ = 0;
  std::condition_variable is_released_;                  // a tensor
  bool is_patient_ = true, has_met_transients_ = false;  // the latter: of this lease
  int top_output_ = -1;                                  // the last site whose output is held
  std::atomic<int> lost_{-1};                            // a site
  int unfinished_ = -1;                                  // likewise
  bool is_forgiven_ = false;                             // the former
  enum class Notice : uint8_t { kUnknown, kNo, kYes } notice_ = Notice::kUnknown;
};

// When a slot was leased, and when its last holder went: nanoseconds since 1970, so that processes
// of several machines can be drawn side by side.
struct Lease {
  int slot;
  bool training;
  int64_t begin;
  int64_t end;  // 0 while it is held
};

// The slots of one bank, handed out in ring order.
class SlotRing {
 public:
  // A slot for each of `pools`, which it keeps alive.
  SlotRing(const std::vector<std::shared_ptr<void>>& pools, int num_sites,
           const std::function<void(int slot, int variant)>& on_free);
  ~SlotRing();
  SlotRing(const SlotRing&) = delete;
  SlotRing& operator=(const SlotRing&) = delete;

  int size() const { return static_cast<int>(slots_.size()); }
  // Null when every slot is held.
  std::shared_ptr<Slot> acquire(int variant, bool training);
  const std::vector<std::shared_ptr<Slot>>& slots() const { return slots_; }
  // Whether every slot waits for its backward.
  bool are_pending() const;
  // Whether none is free.
  bool are_held() const;
  // The most slots that were leased at once, so far.
  int most_leased() const { return most_leased_; }
  // The last leases, the oldest first; none of a ring of one slot, which shows nothing.
  std::vector<Lease> last_leases() const;
  // Before the first lease: takes over what a former ring has counted.
  void continue_from(const SlotRing& former);

 private:
  void begin_lease(int slot, bool training);
  void end_lease(int slot);

  static constexpr size_t kLastLeases = 256;

  std::atomic<int> num_leased_{0};
  int most_leased_ = 0;
  mutable std::mutex leases_mutex_;
  std::vector<Lease> leases_;          // a ring
  size_t num_leases_ = 0;              // so far
  std::vector<size_t> lease_of_slot_;  // the number of each slot's last one
  std::vector<std::shared_ptr<Slot>> slots_;
  size_t next_ = 0;
};

}  // namespace megagraph
