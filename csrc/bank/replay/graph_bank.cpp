// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/replay/graph_bank.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "csrc/bank/replay/finish.h"
#include "csrc/bank/replay/launch.h"
#include "csrc/torch/attempt.h"
#include "csrc/torch/nodes.h"
#include "csrc/torch/thread_state.h"

#ifdef MEGAGRAPH_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "csrc/torch/cuda_streams.h"
#endif

namespace megagraph {
namespace {

bool may_become(BankState from, BankState to) {
  switch (from) {
    case BankState::kWarmUp:
      return to == BankState::kCapturing || to == BankState::kReleased;
    case BankState::kCapturing:
      return to == BankState::kSealed || to == BankState::kReleased;
    case BankState::kSealed:
      return to == BankState::kCapturing || to == BankState::kReleased;
    case BankState::kReleased:
      return to == BankState::kReleased;
  }
  return false;
}

// A bank that nobody released: what staged its last micro-batch may still be about to set grids of
// graphs that were not launched since, which CUDA does not know. Garbage is collected also in the
// middle of a capture, where waiting is forbidden; seen are captures of this thread's stream on the
// bank's device. Who wants to be sure releases the bank.
void wait_for([[maybe_unused]] c10::Device device) noexcept {
#ifdef MEGAGRAPH_WITH_CUDA
  if (!device.is_cuda()) return;
  try {
    const c10::cuda::CUDAGuard guard(device);
    if (!is_capturing()) static_cast<void>(cudaDeviceSynchronize());
  } catch (...) {  // at the end of the process the driver may be gone
  }
#endif
}

std::optional<EagerReason> reason_of_surroundings(bool training) {
  // Saved tensors are packed, or dropped and recomputed: a replay saves none, and a recompute that
  // replays nothing would save some.
  if (training && has_saved_tensor_hooks()) return EagerReason::kRecomputing;
  // Tensors that are made in inference mode can be written nowhere else.
  if (has_dispatch_modes() || has_function_modes() || c10::InferenceMode::is_enabled()) {
    return EagerReason::kSignatureChanged;
  }
  return std::nullopt;
}

const char* name_of(BankState state) { return kBankStateNames[static_cast<size_t>(state)]; }

std::string of_unfinished(int site, int slot) {
  return "the backward of site " + std::to_string(site) + " in slot " + std::to_string(slot) +
         " was never finished: gradients are missing";
}

std::vector<at::Tensor> staged_offsets(const Variant& variant, int slot) {
  std::vector<at::Tensor> found;
  for (size_t i = 0; i < variant.metadata.size(); ++i) {
    const MetadataSpec& spec = variant.metadata[i];
    if (spec.kind == SegmentKind::kOffsets && spec.is_staged()) {
      found.push_back(variant.buffers[i].at(slot));
    }
  }
  return found;
}

}  // namespace

GraphBank::Turn::Turn(GraphBank& bank) : bank_(bank) {
  bank.check_nobody_replays();
  bank.is_replaying_ = true;
}

void GraphBank::check_nobody_replays() const {
  TORCH_CHECK(!is_replaying_, "another thread is replaying this bank: one thread at a time");
}

GraphBank::GraphBank(c10::Device device, int num_sites,
                     const std::vector<std::shared_ptr<void>>& pools, Facing facing, bool poison,
                     RunEagerAlike run_eager_alike)
    : status_(std::make_shared<BankStatus>()),
      device_(device),
      slots_(pools, num_sites, [this](int slot, int variant) { on_slot_free(slot, variant); }),
      facing_(std::move(facing)),
      poison_(poison),
      run_eager_alike_(std::move(run_eager_alike)) {
  TORCH_CHECK_VALUE(num_sites >= 1, "a bank needs at least one site, got ", num_sites);
  TORCH_CHECK_VALUE(facing_.empty() || (num_slots() == 2 && facing_.size() == size_t(num_sites)),
                    "two slots face each other, site by site, got ", num_slots(), " slots and ",
                    facing_.size(), " of ", num_sites, " sites");
  for (int index = 0; index < num_sites; ++index) sites_.push_back(std::make_unique<Site>());
}

template <typename Use>
void GraphBank::for_each_facing(int slot, int site, const Use& use) const {
  if (facing_.empty()) return;
  for (const int other : facing_[site]) use(*facing(slot), other);
}

bool GraphBank::is_facing_held(int slot, int site, bool may_wait) const {
  bool is_held = false;
  for_each_facing(slot, site, [&](Slot& other, int its) {
    is_held = is_held || (may_wait ? !other.await_site(its) : other.is_held(its));
  });
  return is_held;
}

GraphBank::~GraphBank() {
  if (state() != BankState::kReleased) wait_for(device_);
  if (status_->passes == 0) {
    release();
    return;
  }
  // Taken by somebody that a backward calls: its graphs go with its node.
  status_->state.store(BankState::kReleased);
  for (const auto& slot : slots_.slots()) slot->detach();
}

void GraphBank::become(BankState next) {
  const BankState now = state();
  TORCH_CHECK(may_become(now, next), "a ", name_of(now), " bank cannot become ", name_of(next));
  if (next == BankState::kSealed) seal();
  status_->state.store(next);
}

int GraphBank::add_variant(Variant variant) {
  TORCH_CHECK_VALUE(variant.buffers.size() == variant.metadata.size(), "expected the buffers of ",
                    variant.metadata.size(), " metadata specs, got ", variant.buffers.size());
  for (const MetadataSpec& spec : variant.metadata) {
    TORCH_CHECK_VALUE(spec.kind != SegmentKind::kMask || variant.end_source >= 0,
                      "a mask needs the pack's end: set the variant's end_source");
  }
  for (const auto& by_slot : variant.buffers) {
    TORCH_CHECK_VALUE(static_cast<int>(by_slot.size()) == num_slots(), "expected ", num_slots(),
                      " buffers, one for each slot, got ", by_slot.size());
  }
  variants_.push_back(std::move(variant));
  for (const auto& site : sites_) site->add_variant(num_slots());
  grids_.emplace_back(num_slots());
  return static_cast<int>(variants_.size()) - 1;
}

void GraphBank::set_graph(int site, int variant, int slot, std::shared_ptr<SiteGraph> graph) {
  const Boundaries& edges = graph->boundaries;
  TORCH_CHECK(graph->forward != nullptr, "site ", site, " has no forward to replay");
  TORCH_CHECK((graph->backward != nullptr) == variants_.at(variant).training, "site ", site,
              ": a training variant needs a backward, any other has none");
  TORCH_CHECK(edges.inputs.size() == edges.grad_inputs.size() &&
                  edges.outputs.size() == edges.grad_outputs.size() &&
                  edges.params.size() == edges.param_grads.size(),
              "site ", site, ": every boundary needs its gradient's place");
  TORCH_CHECK(edges.outputs.size() == graph->saves_outputs.size() &&
                  edges.outputs.size() == graph->is_transient.size(),
              "site ", site, ": every output needs to be said whether it is saved, or transient");
  Site& owner = *sites_.at(site);
  TORCH_CHECK(owner.graph(variant, slot) == nullptr, "site ", site, " has captured variant ",
              variant, ", slot ", slot, " already");
  for (size_t i = 0; i < edges.inputs.size(); ++i) {
    const bool fewer_rows = variants_[variant].fewer_rows && graph->is_entry && i == 0;
    graph->accepts.push_back(
        TensorSignature::of(edges.inputs[i], edges.grad_inputs[i].defined(), fewer_rows));
  }
  GridTables& grids = grids_.at(variant).at(slot);
  grids.add(graph->forward->document_grids());
  if (graph->backward != nullptr) grids.add(graph->backward->document_grids());
  if (graph->finish != nullptr) grids.add(graph->finish->document_grids());
  owner.set_graph(variant, slot, std::move(graph));
}

void GraphBank::drop_variant(int variant) {
  TORCH_CHECK(all_free(), "graphs go when no slot is held; still held: ", describe_holders());
  for (const auto& site : sites_) site->drop_variant(variant);
  Variant& dropped = variants_.at(variant);
  dropped.metadata.clear();
  dropped.buffers.clear();
  grids_.at(variant).assign(num_slots(), {});
  graphs_.at(variant).clear();
}

void GraphBank::check_source(const Variant& variant, size_t spec,
                             const std::vector<at::Tensor>& sources) const {
  const MetadataSpec& buffer = variant.metadata[spec];
  if (buffer.source < 0) return;
  const at::Tensor& source = sources.at(buffer.source);
  const at::Tensor& target = variant.buffers[spec].front();
  const bool counted = buffer.kind == SegmentKind::kCount;
  const auto type = counted ? at::kInt : target.scalar_type();
  TORCH_CHECK_VALUE(source.device() == device_ && source.is_contiguous() &&
                        source.scalar_type() == type && source.numel() >= 1,
                    "metadata source ", buffer.source, ": expected contiguous ", type, " on ",
                    device_, ", got ", source.scalar_type(), " on ", source.device());
  TORCH_CHECK_VALUE(counted || source.numel() <= target.numel(), "metadata source ", buffer.source,
                    ": expected up to ", target.numel(), " entries, got ", source.numel());
}

std::optional<EagerReason> GraphBank::begin(int variant, std::vector<at::Tensor> sources,
                                            bool look_at_grads) {
  check_nobody_replays();
  TORCH_CHECK(current_ == nullptr, "the previous micro-batch of this bank has not ended");
  TORCH_CHECK(!has_unpoisoned_.exchange(false),
              "a slot that became free could not be filled with NaN (poison)");
  for (const auto& slot : slots_.slots()) {
    const int lost = slot->take_lost();
    TORCH_CHECK(lost < 0, of_unfinished(lost, slot->index()));
  }
  const BankState state = status_->state.load();
  if (state == BankState::kReleased) return EagerReason::kReleased;
  if (state != BankState::kSealed) return EagerReason::kWarmingUp;
  const Variant& wanted = variants_.at(variant);
  if (!(NumericSettings::current(device_.type()) == wanted.numerics)) {
    return EagerReason::kNumericsChanged;
  }
  if (const auto reason = reason_of_surroundings(wanted.training)) return reason;
  if (look_at_grads && wanted.training && graphs_.at(variant).at(0)->have_other_grads()) {
    return EagerReason::kParametersChanged;
  }
  int num_sources = wanted.end_source + 1;
  for (const MetadataSpec& spec : wanted.metadata) {
    num_sources = std::max(num_sources, spec.source + 1);
  }
  TORCH_CHECK_VALUE(static_cast<int>(sources.size()) >= num_sources, "expected ", num_sources,
                    " metadata sources, got ", sources.size());
  for (size_t spec = 0; spec < wanted.metadata.size(); ++spec) {
    check_source(wanted, spec, sources);
  }
  current_ = slots_.acquire(variant, wanted.training);
  if (current_ == nullptr) {
    // How many backwards are to come is the same on every rank, as the program is. A tensor that
    // somebody keeps is not.
    TORCH_CHECK(!run_eager_alike_ || slots_.are_pending(),
                "no slot is free, and these graphs hold collectives, so this "
                "rank cannot run eager alone. Still held: ",
                describe_holders());
    return EagerReason::kNoFreeSlot;
  }
  sources_ = std::move(sources);
  metadata_pending_ = true;
  return std::nullopt;
}

std::optional<EagerReason> GraphBank::reason_before_step(bool training, bool look_at_grads) const {
  if (const auto reason = reason_of_surroundings(training)) return reason;
  for (const auto& by_slot : graphs_) {
    if (training && look_at_grads && !by_slot.empty() && by_slot[0]->have_other_grads()) {
      return EagerReason::kParametersChanged;
    }
  }
  return std::nullopt;
}

void GraphBank::run_eager_alike(int variant, int site, EagerReason reason) const {
  if (!run_eager_alike_ || !is_in_step_ || state() != BankState::kSealed) return;
  if (site >= 0 && sites_[site]->graph(variant, current_->index()) == nullptr) return;
  std::string why = kEagerReasonNames[static_cast<size_t>(reason)];
  if (reason == EagerReason::kNesting) {
    why += ": " + describe_holders();
  } else if (reason == EagerReason::kNumericsChanged && variant >= 0) {
    why += ": " + NumericSettings::current(device_.type()).difference(variants_[variant].numerics);
  } else if (reason == EagerReason::kSignatureChanged && has_dispatch_modes()) {
    why += ": a dispatch mode";
  } else if (reason == EagerReason::kSignatureChanged && has_function_modes()) {
    why += ": a function mode";
  } else if (reason == EagerReason::kSignatureChanged && c10::InferenceMode::is_enabled()) {
    why += ": inference mode";
  } else if (reason == EagerReason::kRecomputing) {
    why += ": saved-tensor hooks";
  }
  run_eager_alike_(number_, variant, site, why);
}

void GraphBank::end() {
  check_nobody_replays();
  TORCH_CHECK(current_ != nullptr, "no micro-batch of this bank is running");
  sources_.clear();
  metadata_pending_ = false;
  finish_ = nullptr;
  std::exchange(current_, nullptr)->end_micro_batch();
}

void GraphBank::watch_backward(const at::Tensor& output,
                               std::vector<std::vector<at::Tensor>> of_sites) {
  const auto& made_by = output.grad_fn();
  if (!made_by) return;
  // The node has the hook, so it is there where that runs.
  output.register_hook([status = status_, number = -++watched_, end = made_by.get(),
                        of_sites = std::move(of_sites)](const at::Tensor&) {
    status->shared_gradients.note(backward_number(), number);
    status->shared_gradients.look(end, of_sites);
  });
}

std::string GraphBank::take_unfinished() {
  std::string text;
  for (const auto& slot : slots_.slots()) {
    const int site = slot->take_unfinished();
    if (site >= 0) text += (text.empty() ? "" : "; ") + of_unfinished(site, slot->index());
  }
  return text;
}

void GraphBank::append_metadata(SegmentList& segments) {
  if (!metadata_pending_) return;
  const Variant& variant = variants_[current_->variant()];
  const int32_t* end = nullptr;
  if (variant.end_source >= 0) {
    const at::Tensor& offsets = sources_.at(variant.end_source);
    end = offsets.const_data_ptr<int32_t>() + offsets.numel() - 1;
  }
  for (size_t i = 0; i < variant.metadata.size(); ++i) {
    const MetadataSpec& spec = variant.metadata[i];
    if (!spec.is_staged()) continue;
    const at::Tensor& target = variant.buffers[i][current_->index()];
    const at::Tensor* source = spec.source < 0 ? nullptr : &sources_.at(spec.source);
    Segment segment{};
    segment.kind = spec.kind;
    segment.src = source ? source->const_data_ptr() : nullptr;
    segment.dst = target.mutable_data_ptr();
    const bool in_bytes = spec.kind == SegmentKind::kCopy;
    segment.dst_size = in_bytes ? target.nbytes() : target.numel();
    segment.src_size = segment.dst_size;  // a mask without a source: only the pack's end counts
    if (source) segment.src_size = in_bytes ? source->nbytes() : source->numel();
    segment.end = end;
    segment.fill = spec.fill;
    segments.add(segment);
    if (spec.kind == SegmentKind::kOffsets) append_document_grids(segments, segment, target);
  }
}

int GraphBank::num_document_grids(int variant, int slot) const {
  const GridTables& grids = grids_.at(variant).at(slot);
  int count = 0;
  for (const at::Tensor& offsets : staged_offsets(variants_[variant], slot)) {
    count += grids.count(offsets);
  }
  return count;
}

void GraphBank::seal() {
  graphs_.resize(variants_.size());
  for (size_t variant = 0; variant < variants_.size(); ++variant) {
    auto& by_slot = graphs_[variant];
    by_slot.clear();
    for (int slot = 0; slot < num_slots(); ++slot) {
      by_slot.push_back(gather(static_cast<int>(variant), slot));
      for (const at::Tensor& offsets : staged_offsets(variants_[variant], slot)) {
        grids_[variant][slot].make(offsets);
      }
    }
  }
}

void GraphBank::append_document_grids(SegmentList& segments, const Segment& offsets,
                                      const at::Tensor& target) {
  const at::Tensor& table = grids_[current_->variant()][current_->index()].of(target);
  if (!table.defined()) return;
  Segment segment = offsets;
  segment.kind = SegmentKind::kGrids;
  segment.num_offsets = segment.dst_size;
  segment.dst = table.mutable_data_ptr();
  segment.dst_size = table.numel() / static_cast<int64_t>(sizeof(DocumentGrid));
  segments.add(segment);
}

void GraphBank::append_input(SegmentList& segments, const at::Tensor& input,
                             const at::Tensor& buffer, bool is_packed) const {
  Segment segment{};
  segment.kind = SegmentKind::kCopy;
  segment.src = input.const_data_ptr();
  segment.dst = buffer.mutable_data_ptr();
  segment.src_size = input.nbytes();
  segment.dst_size = buffer.nbytes();
  const int end_source = variants_[current_->variant()].end_source;
  if (is_packed && end_source >= 0) {
    const at::Tensor& offsets = sources_.at(end_source);
    segment.kind = SegmentKind::kRows;
    segment.row_bytes =
        static_cast<int64_t>(buffer.nbytes()) / std::max<int64_t>(buffer.size(0), 1);
    segment.end = offsets.const_data_ptr<int32_t>() + offsets.numel() - 1;
  }
  segments.add(segment);
}

void GraphBank::on_slot_free(int slot, int variant) noexcept {
  if (!poison_) return;
  const bool is_done = attempt([&] {
    const Launch launch(device_);
    const at::NoGradGuard no_grad;
    const NoDispatchModes plain;  // somebody's may be on wherever a tensor dies
    for (int site = 0; site < num_sites(); ++site) {
      SiteGraph* graph = sites_[site]->graph(variant, slot);
      if (graph == nullptr) continue;
      if (facing_.empty()) {  // else passes of the other slot hand over in that memory, too
        graph->poison_gradients();
        graph->poison_transients();
      }
      // Else what lies there is the other slot's by now.
      if (!is_facing_held(slot, site, /*may_wait=*/false)) graph->poison_kept();
    }
  });
  if (!is_done) has_unpoisoned_ = true;
}

// What the forwards of a slot write over, and others might still read.
void GraphBank::poison_before(int slot, int first, int last) const {
  const Launch launch(device_);
  const at::NoGradGuard no_grad;
  if (first > 0) {
    SiteGraph* before = sites_[first - 1]->graph(slots_.slots()[slot]->variant(), slot);
    // Later passes have not used that memory yet.
    if (before != nullptr) before->poison_transients();
  }
  for (int site = first; site <= last; ++site) {
    for_each_facing(slot, site, [&](const Slot& other, int its) {
      if (other.variant() < 0) return;
      SiteGraph* graph = sites_[its]->graph(other.variant(), other.index());
      if (graph != nullptr) graph->poison_kept();
    });
  }
}

bool GraphBank::all_free() const {
  for (const auto& slot : slots_.slots()) {
    if (!slot->is_free()) return false;
  }
  return true;
}

std::string GraphBank::describe_holders() const {
  std::string text;
  for (const auto& slot : slots_.slots()) {
    if (slot->is_free()) continue;
    if (!text.empty()) text += "; ";
    text += "slot " + std::to_string(slot->index()) + ": " + slot->describe_holders();
  }
  return text;
}

std::shared_ptr<const VariantGraphs> GraphBank::gather(int variant, int slot) const {
  auto gathered = std::make_shared<VariantGraphs>();
  gathered->numerics = variants_[variant].numerics;
  gathered->is_linked = true;
  const SiteGraph* before = nullptr;
  for (const auto& site : sites_) {
    const auto& graph = site->shared_graph(variant, slot);
    gathered->is_linked = gathered->is_linked && graph != nullptr && graph->follows(before);
    gathered->sites.push_back(graph);
    before = graph.get();
  }
  return gathered;
}

void GraphBank::release() {
  if (state() == BankState::kReleased) return;
  TORCH_CHECK(status_->passes == 0,
              "a pass of this bank's graphs is running: release it once that is over");
  status_->state.store(BankState::kReleased);
  for (const auto& slot : slots_.slots()) slot->detach();
  for (const auto& site : sites_) site->release();
  variants_.clear();
  grids_.clear();
  graphs_.clear();
  listener_ = nullptr;
}

}  // namespace megagraph
