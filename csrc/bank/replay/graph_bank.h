// SPDX-License-Identifier: Apache-2.0
// All graphs of one chunk of a model: sites that run one after another, their slots and variants,
// and the micro-batch that runs in them.
//
// Note [Life of a bank]
// warm-up -> capturing -> sealed -> released. A sealed bank may capture further variants between
// steps (sealed -> capturing -> sealed).
//
// A micro-batch is begin(), the sites' calls in order, end(). begin() leases a slot and remembers
// what has to be staged; the first site that replays stages it together with its own input.
//
// A replay allocates nothing on the device. Beside it these are copied: an output of fewer rows
// than were captured, or for another stage of a pipeline; a gradient that comes in another layout;
// and one that autograd would keep, of a leaf or of a parameter with neither main_grad nor a
// gradient yet.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/bank/bank_status.h"
#include "csrc/bank/signature.h"
#include "csrc/bank/replay/site.h"
#include "csrc/bank/replay/slot_ring.h"
#include "csrc/bank/staging/grid_tables.h"
#include "csrc/bank/staging/metadata.h"
#include "csrc/bank/staging/staging.h"
#include "csrc/torch/numerics.h"

namespace megagraph {

class Finish;

// What a bank captured for: a capacity, with or without a backward pass.
struct Variant {
  bool training;  // captured with a backward pass
  // The source whose last entry is the pack's physical end; -1: inputs are staged whole.
  int end_source;
  bool fewer_rows;  // the first site's input may have fewer rows than were captured
  std::vector<MetadataSpec> metadata;
  std::vector<std::vector<at::Tensor>> buffers;  // of each spec, by slot
  NumericSettings numerics;
};

// Learns of finished backward passes. Called from autograd threads; takes the GIL by itself.
struct GradientListener {
  std::function<bool()> wants;  // asked once for each lease
  // Every gradient of the sites first..last is in its main_grad, but what a third pass makes.
  std::function<void(int first, int last)> done;
  std::function<void(int site)> finished;  // and that one's
  // Sites by which somebody waits for what is done by then. The rest is told with the next of
  // them, or with the first site of its node.
  std::vector<bool> is_noticed;
};

// Where graphs hold collectives, a rank that ran eager alone would hang the others. So inside of a
// step it says where it has to, and why; this returns once all have come to the same, or throws.
// `number` is the micro-batch's: a device may be late, and others ask in a later one already.
// `site` is -1 for all of it, and -2 - i for its layer i where the host calls that one by itself.
// Takes the GIL by itself.
using RunEagerAlike =
    std::function<void(int64_t number, int variant, int site, const std::string& why)>;

class GraphBank {
 public:
  // Of two slots that face each other, by site: those of the other slot that lie where it does
  // (Note [Facing slots] in slot_ring.h). Empty: slots share nothing that is kept.
  using Facing = std::vector<std::vector<int>>;

  // `pools`: what keeps the memory of each slot alive; one entry a slot. `poison`: fill the
  // floating-point boundaries of what is free with NaN. `run_eager_alike`: null where graphs hold
  // no collectives.
  GraphBank(c10::Device device, int num_sites, const std::vector<std::shared_ptr<void>>& pools,
            Facing facing, bool poison, RunEagerAlike run_eager_alike);
  ~GraphBank();
  GraphBank(const GraphBank&) = delete;
  GraphBank& operator=(const GraphBank&) = delete;

  BankState state() const { return status_->state.load(); }
  // Throws where Note [Life of a bank] does not allow the step. Sealing gathers each variant's
  // graphs, copies what staging reads of their grids to the device, and waits for it. Tables that
  // are there already stay.
  void become(BankState next);
  Counters& counters() { return status_->counters; }

  int num_sites() const { return static_cast<int>(sites_.size()); }
  int num_slots() const { return slots_.size(); }
  // The most micro-batches that were in flight at once, so far.
  int most_in_flight() const { return slots_.most_leased(); }
  std::vector<Lease> last_leases() const { return slots_.last_leases(); }
  Site& site(int index) { return *sites_.at(index); }
  const Variant& variant(int index) const { return variants_.at(index); }
  c10::Device device() const { return device_; }
  const std::shared_ptr<BankStatus>& status() const { return status_; }

  int add_variant(Variant variant);
  // What a site captured for a variant and a slot, before anything of it is launched.
  void set_graph(int site, int variant, int slot, std::shared_ptr<SiteGraph> graph);
  // Releases the graphs of a variant, which nobody begins again; its pool goes to later ones. The
  // caller has waited for the device, and holds no slot.
  void drop_variant(int variant);
  // How many kernels have their grids set by each micro-batch of this variant and slot.
  int num_document_grids(int variant, int slot) const;
  // Null: nobody listens.
  void set_listener(std::shared_ptr<const GradientListener> listener) {
    listener_ = std::move(listener);
  }
  // Outside of steps, in a verification, the listener is not told of backward passes, and no rank
  // asked to run eager alike.
  void set_in_step(bool is_in_step) { is_in_step_ = is_in_step; }

  // One thread's turn to replay, taken with the GIL held and kept without it. Another thread that
  // meanwhile begins, ends or replays gets an error instead of a race.
  class Turn {
   public:
    explicit Turn(GraphBank& bank);
    ~Turn() { bank_.is_replaying_ = false; }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    GraphBank& bank_;
  };

  // Whether what graphs have baked in is still as where the running micro-batch began. Asked with
  // the GIL held before a site is called by itself: eager code may have run since. Null: it is.
  void set_guard(std::function<bool()> guard) { guard_ = std::move(guard); }
  bool holds_still() const { return !guard_ || guard_(); }
  // The number of the micro-batch that comes next, among those of the step that the same ranks
  // share.
  void set_number(int64_t number) { number_ = number; }
  // Whether begin() would raise because somebody keeps a tensor of every slot: Note [Other
  // threads] in slot_ring.h.
  bool awaits_tensors() const {
    return run_eager_alike_ && slots_.are_held() && !slots_.are_pending();
  }
  // Why a step that begins now would run eager, its micro-batches that record gradients or those
  // that do not: what somebody has told torch, or left in parameters.
  std::optional<EagerReason> reason_before_step(bool training, bool look_at_grads) const;
  // To be called with a reason that was found inside of a step, before what it is about runs eager;
  // see RunEagerAlike. `variant` is -1 if it has no graphs.
  void run_eager_alike(int variant, int site, EagerReason reason) const;
  // Leases a slot for a micro-batch of `variant`, or answers why not. `sources` are tensors on the
  // bank's device, as the variant's metadata buffers name them by index. `look_at_grads`:
  // parameters may hold gradients beside main_grad (VariantGraphs); to look at each of them costs
  // more than all the rest.
  std::optional<EagerReason> begin(int variant, std::vector<at::Tensor> sources,
                                   bool look_at_grads);
  void end();
  // The output of a micro-batch that ran eager, with a main_grad for its gradients: notes which
  // backward makes these, and what else that gives the parameters `of_sites`.
  void watch_backward(const at::Tensor& output, std::vector<std::vector<at::Tensor>> of_sites);
  std::string shared_gradients() const { return status_->shared_gradients.met(); }
  // The slot that shares memory with another one; null if none does.
  std::shared_ptr<Slot> facing(int slot) const {
    return facing_.empty() ? nullptr : slots_.slots()[1 - slot];
  }
  // The running micro-batch's slot; null between micro-batches.
  const std::shared_ptr<Slot>& current() const { return current_; }

  // Whether the running micro-batch can replay all sites in one go: Note [Spans] in
  // replay_span.cpp.
  bool is_linked() const;
  // Replays the running micro-batch's graphs on `inputs` and appends the last one's outputs, or
  // answers why the caller has to run eager, which is for the caller to count. Of one site, or of
  // several where is_linked(). On the current stream; never waits for the device.
  std::optional<EagerReason> replay(int first, int last, const std::vector<at::Tensor>& inputs,
                                    std::vector<at::Tensor>& outputs);

  // What finishes the backward of the site that replayed last, in the running micro-batch; null if
  // nothing will be left of it, or somebody has taken it.
  std::shared_ptr<Finish> take_finish() { return std::move(finish_); }
  // Backwards that were not finished, in words, those that wait for it included; which nobody then
  // complains about any more. At the end of a step, or where one has failed.
  std::string take_unfinished();

  // Appends the running micro-batch's metadata, as long as it is not staged.
  void append_metadata(SegmentList& segments);
  // Appends `input`. Of a packed one, rows past the pack's end become zero.
  void append_input(SegmentList& segments, const at::Tensor& input, const at::Tensor& buffer,
                    bool is_packed) const;

  bool have_borrowed_moved() const {
    return std::any_of(sites_.begin(), sites_.end(),
                       [](const auto& site) { return site->have_borrowed_moved(); });
  }
  bool all_free() const;
  std::string describe_holders() const;
  // Null if nobody is to be told.
  std::shared_ptr<const GradientListener> listener() const {
    return is_in_step_ ? listener_ : nullptr;
  }
  // Before the first micro-batch: takes over what a former bank of as many slots has counted.
  void continue_from(const GraphBank& former) {
    counters().add(former.status_->counters);
    slots_.continue_from(former.slots_);
  }
  // Drops every graph. Backward passes that are still pending raise from now on. The caller has
  // waited for the device; throws while a pass runs, on whatever thread.
  void release();

 private:
  void seal();
  void append_document_grids(SegmentList& segments, const Segment& offsets,
                             const at::Tensor& target);
  void on_slot_free(int slot, int variant) noexcept;
  // Calls `use` with the other slot and each of its sites that lies where `site` of this one does.
  template <typename Use>
  void for_each_facing(int slot, int site, const Use& use) const;
  // Whether one of them is held; if graphs hold collectives, once other threads have had their
  // moment.
  bool is_facing_held(int slot, int site, bool may_wait) const;
  void poison_before(int slot, int first, int last) const;
  void check_nobody_replays() const;
  std::shared_ptr<const VariantGraphs> gather(int variant, int slot) const;
  void check_source(const Variant& variant, size_t spec,
                    const std::vector<at::Tensor>& sources) const;

  const std::shared_ptr<BankStatus> status_;
  const c10::Device device_;
  std::vector<std::unique_ptr<Site>> sites_;
  SlotRing slots_;
  std::vector<Variant> variants_;
  std::vector<std::vector<GridTables>> grids_;  // [variant][slot]
  std::shared_ptr<const GradientListener> listener_;
  bool is_in_step_ = true;
  const Facing facing_;
  const bool poison_;
  const RunEagerAlike run_eager_alike_;
  int64_t number_ = 0;   // of the micro-batch
  int64_t watched_ = 0;  // eager ones
  std::function<bool()> guard_;

  std::vector<std::vector<std::shared_ptr<const VariantGraphs>>> graphs_;  // [variant][slot]
  std::atomic<bool> is_replaying_{false};
  std::atomic<bool> has_unpoisoned_{false};  // a freed slot could not be filled with NaN

  std::shared_ptr<Slot> current_;
  std::shared_ptr<Finish> finish_;
  std::vector<at::Tensor> sources_;  // of the running micro-batch
  bool metadata_pending_ = false;
};

}  // namespace megagraph
