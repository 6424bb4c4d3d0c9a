// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/dispatcher.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "csrc/python/eager_reasons.h"
#include "csrc/python/pack_reader.h"
#include "csrc/torch/nodes.h"
#include "csrc/torch/numerics.h"
#include "csrc/torch/python_tensors.h"
#include "csrc/torch/thread_state.h"
#include "csrc/watch/references.h"

namespace py = pybind11;

namespace megagraph {
namespace {

// More would be states that are new in each step, which have no graphs.
constexpr size_t kMostVariants = 256;
constexpr int kEvaluations = 20;  // from which capacities are learned if nobody trains

// Lets other threads run meanwhile.
void wait_for_tensors(const GraphBank& bank) {
  if (!bank.awaits_tensors()) return;
  const py::gil_scoped_release no_gil;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (bank.awaits_tensors() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

std::optional<EagerReason> begin_micro_batch(GraphBank& bank, int variant,
                                             std::vector<at::Tensor> sources, bool look_at_grads) {
  wait_for_tensors(bank);
  const auto reason = bank.begin(variant, std::move(sources), look_at_grads);
  // How many passes are to come is the same on ranks that run the same packs, as the program is.
  if (reason && reason != EagerReason::kNoFreeSlot) {
    bank.run_eager_alike(variant, /*site=*/-1, *reason);
  }
  return reason;
}

Dispatcher::Dispatcher(const DispatchOptions& options)
    : options_(options),
      rules_(std::make_shared<const BatchRules>(options.rules)),
      states_(options.ranks, options.run_alike),
      due_(options.warm_up_steps) {
  if (options_.is_by_token) stage_freqs();
}

void Dispatcher::set_capacities(std::map<int64_t, std::vector<Capacity>> by_cp_size,
                                bool of_evaluations) {
  capacities_ = std::move(by_cp_size);
  is_of_evaluations_ = of_evaluations;
}

void Dispatcher::use(std::shared_ptr<GraphBank> bank, std::map<VariantKey, int> variants,
                     std::map<VariantKey, EagerReason> eager_variants,
                     std::shared_ptr<ModuleWatch> watch) {
  bank_ = std::move(bank);
  variants_ = std::move(variants);
  eager_variants_ = std::move(eager_variants);
  watch_ = std::move(watch);
  has_new_arguments_ = has_new_arguments_ && !variants_.empty();  // of graphs that are left
  // The bank may go on another thread, which must free nothing of Python's.
  bank_->set_guard([watch = std::weak_ptr(watch_), state = state_] {
    const auto its = watch.lock();
    return !*state || !its || its->state(false) == **state;
  });
  calls_ = 0;
  for (int index = 0; index < bank_->num_sites(); ++index) calls_ += bank_->site(index).calls();
}

std::optional<bool> Dispatcher::look_for_freqs(const py::object& table, const py::object& params,
                                               int64_t tokens) {
  if (rules_->freqs) return true;
  if (!options_.may_be_by_token) return false;
  const std::vector<at::Tensor> freqs = freqs_in(table);
  if (freqs.empty() || freqs[0].size(0) != tokens) return false;
  const auto longest = longest_document(params);
  if (!longest || *longest == tokens) return std::nullopt;
  stage_freqs();
  return true;
}

void Dispatcher::stage_freqs() {
  BatchRules rules = *rules_;
  rules.depends_on_longest = false;
  rules.freqs = std::make_shared<py::object>(py::none());
  rules_ = std::make_shared<const BatchRules>(std::move(rules));
  due_.forget_tables();
}

// The state first: it has the layers, and of others that are gone nothing can be asked.
bool Dispatcher::is_unchanged() {
  return options_.ranks == 1 && !states_.has_many() &&
         states_.is_met(watch_->state(true),
                        NumericSettings::current(bank_->device().type()).hash()) &&
         watch_->is_as_expected() && !bank_->have_borrowed_moved() && !has_new_arguments_;
}

Dispatcher::Found Dispatcher::find(const py::object& params, int64_t tokens) const {
  if (refused_) return {refused_};
  const std::optional<int64_t> cp_size = known_cp_size(params);
  const auto shape =
      pack_shape(params, tokens, rules_->extra_seqs, cp_size.value_or(options_.cp_size));
  if (!shape) return {EagerReason::kNoPackMetadata};
  if (!cp_size || (groups_.empty() && has_own_ranks(params, *cp_size))) {
    return {EagerReason::kCpSizeNotCaptured};
  }
  const auto form = pack_form(params, bank_->device());
  if (!form || (form->has_seq_idx && !is_seq_idx_stageable(params, tokens))) {
    return {EagerReason::kSignatureChanged};
  }
  Found found{std::nullopt, *shape, *form};
  if (!capacities_.empty()) {
    const auto of_size = capacities_.find(*cp_size);
    if (of_size == capacities_.end()) return {EagerReason::kCpSizeNotCaptured};
    const std::vector<Capacity>& known = of_size->second;
    const Decision decision = decide(*shape, known);
    if (decision.capacity < 0) {
      const Capacity most = most_needed_.value_or(Capacity{0, 0, 0});
      most_needed_ =
          Capacity{std::max(most.tokens, shape->tokens), std::max(most.num_seqs, shape->num_seqs),
                   std::max(most.max_seqlen, shape->longest())};
    }
    if (decision.capacity >= 0) {
      found.capacity = known[decision.capacity];
    } else if (rules_->needs_equal_rows && !known.empty() &&
               decision.reason != EagerReason::kTooManyTokens) {
      const int64_t rows = known[0].tokens;
      found.capacity = Capacity{rows, shape->num_seqs, std::max(shape->max_seqlen, rows)};
      found.misfit = decision.reason;
    } else {
      return {decision.reason};
    }
  }
  if (!can_be_made(params)) return {EagerReason::kSignatureChanged};
  return found;
}

std::optional<EagerReason> Dispatcher::eager_reason(const py::object& params, int64_t tokens,
                                                    bool is_settled) const {
  if (!options_.run_alike) return EagerReason::kGroupDisagreed;  // others may call it less often
  const bool is_learning = known().empty();
  // Another rank may be able to read its pack, and ask this one before its step what it has
  // learned.
  const bool asks_others = options_.ranks > 1 || rules_->needs_equal_rows;
  if (!is_settled || (is_learning && asks_others)) return std::nullopt;
  return find(params, tokens).against;
}

std::optional<EagerReason> Dispatcher::eager_reason_of_step(bool is_skipped, bool grad) const {
  if (is_skipped || options_.is_eager) return EagerReason::kDisabled;
  if (is_suspended_) return EagerReason::kSuspended;
  return grad && gradients_reason_ ? gradients_reason_ : reason_;
}

py::object Dispatcher::enter(const py::object& params, int64_t tokens, const py::object& mask,
                             bool is_mask_shared, bool are_megatrons, bool is_settled) {
  if (counts_packs_) observe(params, tokens);
  const Found found = find(params, tokens);
  if (found.against) return python_reason(found.against);
  const int64_t cp_size = found.shape.cp_size;
  bank_->set_number(++numbers_[cp_size]);
  // Another rank may be in another mode, and its collectives are of a capacity's rows.
  const bool is_inference = c10::InferenceMode::is_enabled();
  if ((is_inference && options_.ranks == 1) || may_positions_go_on(found.shape)) {
    return python_reason(EagerReason::kSignatureChanged);
  }
  const size_t fingerprint = watch_->state(false);
  const int64_t state = states_.of_call(fingerprint);
  // What a forward of the host's makes of a mask shows where it calls its block.
  const bool masks_at_entry = rules_->masks_tail && rules_->pads_at_entry;
  const bool has_mask = are_megatrons && (masks_at_entry || !mask.is_none());
  const VariantKey kind{std::nullopt, found.form, at::GradMode::is_enabled(), state,
                        has_mask,     cp_size,    rules_->freqs != nullptr};
  if (!is_settled) return python_reason(EagerReason::kWarmingUp);
  const bool is_taken = mask.is_none() || is_mask(mask, tokens, bank_->device());
  // Layers of experts take samples of one length apart again.
  const bool are_samples = rules_->masks_tail && is_of_samples(params);
  if ((has_mask && !(is_mask_shared && is_taken)) || are_samples) {
    return python_reason(EagerReason::kSignatureChanged);
  }
  if (!found.misfit && !is_inference) due_.note(kind);
  const VariantKey key = kind.of_capacity(found.capacity);
  const bool is_skipped = megagraph::is_skipped();
  auto reason = found.misfit ? found.misfit : eager_reason_of_step(is_skipped, kind.grad);
  params_type_ = py::type::of(params);
  for (const py::object& name : megagraph::host_names(params)) {
    const bool is_new = !host_names_.contains(name) && host_names_.add(name);
    has_new_arguments_ =
        has_new_arguments_ || (is_new && !variants_.empty() && read_names_.contains(name));
  }
  if (!reason && has_new_arguments_) reason = EagerReason::kSignatureChanged;
  // All of these are on canonical packs; but of several ranks one alone may skip graphs.
  const bool is_reference =
      options_.is_eager || rules_->needs_equal_rows || (is_skipped && options_.ranks == 1);
  bool has_no_graph = false, is_due = false;
  if (!found.capacity) {
    // Evaluations repeat packs, which must not outnumber those to train on.
    if (!counts_packs_) {
      int64_t& times = observed_[found.shape];
      times = kind.grad ? times + 1 : std::max<int64_t>(times, 1);
    }
    reason = EagerReason::kWarmingUp;
  } else if (!is_reference && variants_.count(key) == 0) {
    const auto why = eager_variants_.find(key);
    // Another rank may be in another state, and replay: its collectives are of as many rows.
    has_no_graph = why != eager_variants_.end() && (options_.ranks == 1 || is_state_agreed(key));
    if (has_no_graph && !is_skipped) reason = why->second;
    is_due = !reason && options_.ranks == 1 && due_.due().count(kind) != 0 && !is_in_backward();
  }
  auto batch = std::make_unique<MicroBatch>(
      rules_, packs_of(key), groups_.empty() ? params : without_ranks(params), tokens, reason,
      pack_sources(params, found.form, cp_size), is_due);
  batch->set_state(fingerprint);
  if (!found.capacity && has_mask && !mask.is_none()) batch->replace_mask(tensor_of(mask.ptr()));
  if (has_no_graph && !(are_megatrons && batch->run_as_given(*reason))) {
    return python_reason(reason);
  }
  return py::cast(std::move(batch));
}

void Dispatcher::require_rows(int64_t tokens, EagerReason reason) const {
  if (!rules_->needs_equal_rows || known().empty()) return;
  megagraph::require_rows(known()[0].tokens, tokens, reason);
}

bool Dispatcher::take(MicroBatch& batch, const py::object& hidden_states, const py::object& table,
                      const py::object& mask) {
  if (batch.take_mask(mask, hidden_states) && batch.take_freqs(table)) return true;
  run_as_given(batch, hidden_states, table);
  return false;
}

void Dispatcher::run_as_given(MicroBatch& batch, const py::object& hidden_states,
                              const py::object& table) {
  leave_graphs(batch);
  batch.run_as_given(batch.is_own(table, hidden_states));
  count_eager(*batch.reason());
}

void Dispatcher::turn_eager(Constants& constants, MicroBatch& batch,
                            const py::object& hidden_states, const py::object& table,
                            std::optional<at::Tensor> mask) {
  batch.replace_mask(std::move(mask));
  leave_graphs(batch);
  if (!batch.is_own(table, hidden_states)) {
    batch.run_as_given(/*is_own_table=*/false);
  } else if (is_tensor(table.ptr()) && !has_new_arguments_ && tables_to_come_ > 0 &&
             !batch.key().by_token && !constants.is_equal(py::str("rotary_pos_emb"), table)) {
    has_new_arguments_ = true;
    --tables_to_come_;
  }
}

void Dispatcher::leave_graphs(MicroBatch& batch) const {
  batch.set_reason(EagerReason::kSignatureChanged);
  bank_->run_eager_alike(variant_of(batch.key()), /*site=*/-1, EagerReason::kSignatureChanged);
}

std::optional<int> Dispatcher::begin(MicroBatch& batch) {
  const int variant = variant_of(batch.key());
  // Since the model was entered, as by a hook on its embedding.
  bool has_changed = false;
  if (!batch.reason() && variant >= 0) {
    has_changed = watch_->state(false) != batch.state();
    batch.set_reason(has_changed ? EagerReason::kStateChanged
                                 : begin_micro_batch(*bank_, variant, batch.sources(),
                                                     watch_->have_other_grads()));
    if (!batch.reason()) {
      *state_ = batch.state();
      return variant;
    }
  } else if (!batch.reason()) {
    const auto why = eager_variants_.find(batch.key());
    batch.set_reason(why == eager_variants_.end() ? EagerReason::kWarmingUp : why->second);
  }
  const bool is_agreed = !has_changed && is_eager_agreed(batch);
  batch.set_reason(explain(batch.key().kind(), *batch.reason()));
  if (!is_agreed) bank_->run_eager_alike(variant, /*site=*/-1, *batch.reason());
  count(batch);
  return std::nullopt;
}

void Dispatcher::expect_state(MicroBatch& batch) {
  batch.set_state(watch_->state(false));
  if (*state_) *state_ = batch.state();
}

void Dispatcher::end(const MicroBatch& batch) {
  state_->reset();
  bank_->end();
  count(batch);
  if (batch.reason()) {
    count_eager(*batch.reason());
  } else {
    replayed_tokens_ += batch.capacity().tokens;
  }
}

void Dispatcher::count_eager(EagerReason reason) {
  bank_->counters().count_eager(refused_.value_or(reason), calls_);
}

bool Dispatcher::is_eager_agreed(const MicroBatch& batch) const {
  if (reason_ || (batch.key().grad && gradients_reason_)) return true;
  switch (*batch.reason()) {
    case EagerReason::kNoFreeSlot:
      return options_.run_alike;
    case EagerReason::kTooManySequences:
    case EagerReason::kSequenceTooLong:
      return true;
    case EagerReason::kDisabled:
    case EagerReason::kSuspended:
      break;
    default:  // of a variant with graphs begin_micro_batch() has asked
      if (variants_.count(batch.key()) != 0) return true;
  }
  return is_state_agreed(batch.key()) && eager_variants_.count(batch.key()) != 0;
}

EagerReason Dispatcher::explain(const VariantKey& kind, EagerReason reason) {
  if (reason == EagerReason::kNumericsChanged) {  // since the step began
    const auto settings = NumericSettings::current(bank_->device().type()).hash();
    due_.note(kind.in_state(states_.under(settings)));
  }
  if (reason == EagerReason::kWarmingUp && due_.captured().count(kind) == 0) {
    std::vector<int64_t> others;
    for (const VariantKey& other : due_.captured_of_family(kind)) others.push_back(other.state);
    if (!others.empty()) reason = states_.eager_reason(kind.state, others);
  }
  return reason;
}

const std::vector<Capacity>& Dispatcher::known() const {
  static const std::vector<Capacity> none;
  const auto of_size = capacities_.find(options_.cp_size);
  return of_size == capacities_.end() ? none : of_size->second;
}

int Dispatcher::variant_of(const VariantKey& key) const {
  const auto known = variants_.find(key);
  return known == variants_.end() ? -1 : known->second;
}

void Dispatcher::count(const MicroBatch& batch) { ++counts_[batch.key().cp_size][batch.reason()]; }

std::shared_ptr<CanonicalPacks> Dispatcher::packs_of(const VariantKey& key) {
  const auto made = made_.find(key);
  if (made != made_.end()) return made->second;
  if (made_.size() >= kMostVariants) made_.clear();
  return made_.emplace(key, std::make_shared<CanonicalPacks>(key, rules_->extra_seqs))
      .first->second;
}

// Megatron's table has a row for each of the longest document's: of as many as the pack has, each
// row of the pack gets its own. Where it cuts a longer one to the pack's rows, that is so as well;
// it cuts none of packs that ranks share. In a document alone both meanings are one.
bool Dispatcher::may_positions_go_on(const PackShape& shape) const {
  if (!rules_->depends_on_longest || shape.num_seqs - rules_->extra_seqs < 2) return false;
  const int64_t tokens = shape.tokens * shape.cp_size;
  const bool are_cut = options_.cuts_tables && shape.cp_size == 1;
  return are_cut ? shape.max_seqlen >= tokens : shape.max_seqlen == tokens;
}

bool Dispatcher::expect(int64_t seq_length, bool trains) {
  if (trains || !trains_) expected_tokens_ = groups_.empty() ? seq_length / options_.cp_size : 0;
  if (!trains) return false;
  trains_ = true;
  evaluations_ = 0;
  if (!is_of_evaluations_) return false;
  set_capacities({}, false);
  return true;
}

bool Dispatcher::has_trained() const {
  const VariantKeys& warm = due_.warmed_up();
  return std::any_of(warm.begin(), warm.end(), [](const VariantKey& kind) { return kind.grad; });
}

bool Dispatcher::has_seen_enough() {
  evaluations_ += !due_.warmed_up().empty();
  return has_trained() || evaluations_ >= kEvaluations;
}

// Also of what no graph may take, as in a step without any.
void Dispatcher::observe(const py::object& params, int64_t tokens) {
  const int64_t cp_size = known_cp_size(params).value_or(options_.cp_size);
  const auto shape = pack_shape(params, tokens, rules_->extra_seqs, cp_size);
  if (shape) ++observed_[*shape];
}

// How many ranks share a pack; none where they are in another group than graphs were captured with.
std::optional<int64_t> Dispatcher::known_cp_size(const py::object& params) const {
  if (groups_.empty() || params.is_none()) return options_.cp_size;
  const py::object group = cp_group_of(params);
  const auto own = local_cp_size(params);
  if (!own) return group.is_none() ? std::optional(options_.cp_size) : std::nullopt;
  const py::int_ size(*own);
  if (!groups_.contains(size)) return std::nullopt;
  if (*own == 1) return own;
  const auto is_given = [&](py::handle known) { return known.is(group); };
  const py::tuple known = groups_[size];
  return std::any_of(known.begin(), known.end(), is_given) ? own : std::nullopt;
}

}  // namespace megagraph
