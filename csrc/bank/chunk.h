// SPDX-License-Identifier: Apache-2.0
// One model chunk of a bank: its sites, slots and variants, and the micro-batch that runs in it.
//
// A micro-batch is begin(), the sites' calls in order, end(). begin() leases a slot and remembers
// what has to be staged; the first site that replays stages it together with its own input.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/bank/graph_bank.h"
#include "csrc/bank/grid_tables.h"
#include "csrc/bank/signature.h"
#include "csrc/bank/site.h"
#include "csrc/bank/slot_ring.h"
#include "csrc/bank/staging.h"

namespace megagraph {

// A metadata buffer that graphs read, filled anew for each micro-batch.
struct MetadataBuffer {
  SegmentKind kind;
  std::vector<at::Tensor> by_slot;
  // Index into the sources that begin() is given; -1: no source, only the pack's end counts.
  int source;
  int32_t fill;
  bool extend_last;
};

// What a chunk captured for: a capacity, with or without a backward pass.
struct Variant {
  bool training;  // captured with a backward pass
  NumericSettings numerics;
  std::vector<MetadataBuffer> metadata;
  // The source whose last entry is the pack's physical end; -1: inputs are staged whole.
  int end_source;
};

// Learns of finished backward passes. Called from autograd threads; takes the GIL by itself.
struct GradientListener {
  std::function<bool()> wants;         // asked once for each lease
  std::function<void(int rank)> done;  // every gradient of the site is in its main_grad
};

class Chunk {
 public:
  Chunk(std::shared_ptr<BankStatus> bank, c10::Device device, int num_sites);
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  int num_sites() const { return static_cast<int>(sites_.size()); }
  int num_slots() const { return slots_ ? slots_->size() : 0; }
  int num_variants() const { return static_cast<int>(variants_.size()); }
  Site& site(int rank) { return *sites_.at(rank); }
  const Variant& variant(int index) const { return variants_.at(index); }
  c10::Device device() const { return device_; }
  const std::shared_ptr<BankStatus>& bank() const { return bank_; }

  // Before the first variant. `pools`: what keeps each slot's memory alive. `poison`: fill a freed
  // slot's floating-point boundaries with NaN. `holds_collectives`: the graphs contain collectives,
  // so that falling back to eager on one rank alone would hang the group.
  void set_slots(int num_slots, const std::vector<std::shared_ptr<void>>& pools, bool poison,
                 bool holds_collectives);
  int add_variant(Variant variant);
  // Before a graph of this variant and slot is launched.
  void add_document_grids(int variant, int slot, const Executable& executable);
  // How many kernels have their grids set by each micro-batch of this variant and slot.
  int num_document_grids(int variant, int slot) const;
  // Copies what staging reads of them to the device, and waits for it: when the bank is sealed.
  // What is there already stays.
  void make_grid_tables();
  // Null: nobody listens.
  void set_listener(std::shared_ptr<const GradientListener> listener) {
    listener_ = std::move(listener);
  }

  // Leases a slot for a micro-batch of `variant`, or answers why not. `sources` are tensors on the
  // chunk's device, as the variant's metadata buffers name them by index.
  std::optional<EagerReason> begin(int variant, const std::vector<at::Tensor>& sources);
  void end();
  // The running micro-batch's slot; null between micro-batches.
  const std::shared_ptr<Slot>& current() const { return current_; }

  // Whether the running micro-batch can replay these sites in one go: Note [Runs] in
  // replay_run.cpp.
  bool is_run(int first, int last) const;
  // Replays the running micro-batch's graphs on `inputs` and appends the last one's outputs, or
  // answers why the caller has to run eager, which is for the caller to count. Of one site, or of
  // several where is_run(). On the current stream; never waits.
  std::optional<EagerReason> replay(int first, int last, const std::vector<at::Tensor>& inputs,
                                    std::vector<at::Tensor>& outputs);

  // Appends the running micro-batch's metadata, as long as it is not staged.
  void append_metadata(SegmentList& segments);
  // Appends `input`. Of a packed one, rows past the pack's end become zero.
  void append_input(SegmentList& segments, const at::Tensor& input, const at::Tensor& buffer,
                    bool is_packed) const;

  bool all_free() const;
  std::string describe_holders() const;
  const std::shared_ptr<const GradientListener>& listener() const { return listener_; }
  void release();

 private:
  void append_document_grids(SegmentList& segments, const Segment& offsets,
                             const at::Tensor& target);
  void on_slot_free(int slot, int variant);
  void check_source(const MetadataBuffer& buffer, const std::vector<at::Tensor>& sources) const;

  const std::shared_ptr<BankStatus> bank_;
  const c10::Device device_;
  std::vector<std::unique_ptr<Site>> sites_;
  std::unique_ptr<SlotRing> slots_;
  std::vector<Variant> variants_;
  std::vector<std::vector<GridTables>> grids_;  // [variant][slot]
  std::shared_ptr<const GradientListener> listener_;
  bool poison_ = false, holds_collectives_ = false;

  std::shared_ptr<Slot> current_;
  std::vector<at::Tensor> sources_;  // of the running micro-batch
  bool metadata_pending_ = false;
};

}  // namespace megagraph
