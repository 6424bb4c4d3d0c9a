// SPDX-License-Identifier: Apache-2.0
// Decides on the micro-batches of one model: which variant takes a pack, or why none does. Leases a
// slot for those that replay.
//
// Note [Dispatch]
// In each micro-batch, eager or not, without waiting for the device. The pack is read once. What is
// asked for first makes no variant: a pack that no graph of the model could take costs no look at
// the layers. What makes one beside the capacity and the form is whether gradients are recorded,
// and the state that the layers are in.
//
// A dispatcher lives as long as its model. Its bank goes when a change releases it, and another one
// comes (`use()`); states and what is due go on.
//
// What no step begins with is captured inside: a reference without adapters beside its policy, a
// pass in evaluation mode, a frozen model in another one's step. A micro-batch without a graph,
// whose kind an earlier step has held, says that it is due, and begins with a boundary of its own
// where these hold; else it stays eager:
// - no slot is held, so that no backward of graphs is to come. What an eager one needs is put back
//   as after any capture: accumulators, gradients, versions;
// - nothing that graphs rely on has changed but the state: whatever such a change is due waits;
// - no rank has to agree, nor awaits rows, as in a pipeline: one may have posted a receive that
//   only this call's rows can answer, and a capture waits for the device;
// - no backward and no capture runs.
//
// Rotary positions begin anew in each document of a canonical pack. So packs run as given in which
// Megatron's unfused RoPE may go on from document to document.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/bank/replay/graph_bank.h"
#include "csrc/decide/dispatch.h"
#include "csrc/decide/due_variants.h"
#include "csrc/decide/states.h"
#include "csrc/python/constants.h"
#include "csrc/decide/variant_key.h"
#include "csrc/python/micro_batch.h"
#include "csrc/watch/module_watch.h"

namespace megagraph {

struct DispatchOptions {
  BatchRules rules;
  bool is_by_token = false;      // rotary frequencies have a row for each token
  bool may_be_by_token = false;  // or that may show
  bool cuts_tables = false;      // the model cuts its rotary tables to the rows of the pack
  bool is_eager = false;         // no micro-batch replays, and each runs on its canonical pack
  int64_t cp_size = 1;           // of packs that do not say their own
  int ranks = 1;                 // that are in a state together
  bool run_alike = true;         // these run the same packs
  int warm_up_steps = 1;         // training steps before the first capture
};

// `GraphBank::begin()`, after waiting for tensors that other threads are about to free: Note [Other
// threads] in slot_ring.h. What others may not know of runs eager alike on all ranks.
std::optional<EagerReason> begin_micro_batch(GraphBank& bank, int variant,
                                             std::vector<at::Tensor> sources, bool look_at_grads);

// Micro-batches by the number of ranks that share them, and by reason; none for those that
// replayed.
using Counts = std::map<int64_t, std::map<std::optional<EagerReason>, int64_t>>;

class Dispatcher {
 public:
  // What the rules hold of Python's must not lead back to this object: garbage collection does not
  // see what C++ holds.
  explicit Dispatcher(const DispatchOptions& options);
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  // -- between steps --
  // By context-parallel size; none while they are still to be learned. `of_evaluations`: no rank
  // has trained yet of those that learned them.
  void set_capacities(std::map<int64_t, std::vector<Capacity>> by_cp_size, bool of_evaluations);
  const std::map<int64_t, std::vector<Capacity>>& capacities() const { return capacities_; }
  // By context-parallel size, the process groups that a pack may name, a tuple of equal ones; none
  // where every pack is shared alike.
  void set_groups(pybind11::dict by_cp_size) { groups_ = std::move(by_cp_size); }
  // The bank of now: its variants by index, and those that stay eager; what its graphs rely on.
  void use(std::shared_ptr<GraphBank> bank, std::map<VariantKey, int> variants,
           std::map<VariantKey, EagerReason> eager_variants, std::shared_ptr<ModuleWatch> watch);
  // What layers are handed in a micro-batch of `tokens` shows whether rotary frequencies have a row
  // for each; if they do, they are staged from now on. None if they may be a table, too, as long as
  // the longest document.
  std::optional<bool> look_for_freqs(const pybind11::object& table, const pybind11::object& params,
                                     int64_t tokens);
  bool is_by_token() const { return rules_->freqs != nullptr; }
  // What `BatchRules` say of them; None where tables have a row for each position.
  pybind11::object freqs() const { return rules_->freqs ? *rules_->freqs : pybind11::none(); }
  // Why the model takes no graph at all; none where it does.
  void refuse(std::optional<EagerReason> reason) { refused_ = reason; }
  // Why every micro-batch of the running step runs eager, and why those do that record gradients.
  void keep_eager(std::optional<EagerReason> reason, std::optional<EagerReason> gradients_reason) {
    reason_ = reason;
    gradients_reason_ = gradients_reason;
    numbers_.clear();
  }
  // Nothing replays as long as it is.
  void set_suspended(bool is_suspended) { is_suspended_ = is_suspended; }
  // Whether the layers' state and all that graphs rely on are as at the last boundary: nothing has
  // to be dropped or told. False where other ranks have to be asked, or states are to be forgotten.
  bool is_unchanged();
  // The class of the last pack that a capacity may hold; None before.
  const pybind11::object& params_type() const { return params_type_; }
  // What hosts have put on such packs, and what was read from packs of graphs.
  const pybind11::set& host_names() const { return host_names_; }
  const pybind11::set& read_names() const { return read_names_; }
  // Whether some of the latter came on a pack only since, so that graphs have its default, or the
  // model's own rotary table is another one than that of the graphs.
  bool has_new_arguments() const { return has_new_arguments_; }
  // The shapes of packs that came while capacities were to be learned, and, since `count_packs()`,
  // of all others that were asked about: how often each came. Evaluations repeat packs, which must
  // not outnumber those to train on: one of theirs counts once.
  const std::map<PackShape, int64_t>& observed() const { return observed_; }
  void count_packs() { counts_packs_ = true; }
  // Behind a step that trains or evaluates, on packs of at most so many tokens, as its schedule
  // says; 0 or 1 if it does not. What evaluations say counts until somebody trains. Whether
  // capacities are forgotten, to be learned anew: they were learned from evaluations alone.
  bool expect(int64_t seq_length, bool trains);
  // Before a step, while capacities are to be learned: whether packs have come to train on; and
  // whether enough have. Those of evaluations are smaller, and learned from if no others come.
  bool has_trained() const;
  bool has_seen_enough();
  Needs needs() const { return needs_of(observed_, rules_->extra_seqs, expected_tokens_); }
  States& states() { return states_; }
  DueVariants& due() { return due_; }

  // -- in a step --
  // Why no graph of the model could take a pack of `tokens` rows, whatever state the layers are in;
  // None where one could, or that is not known yet.
  std::optional<EagerReason> eager_reason(const pybind11::object& params, int64_t tokens,
                                          bool is_settled) const;
  // A `MicroBatch`, to be padded to its capacity, or the reason why it runs as it was given. Its
  // key has no capacity while these are to be learned, and it runs as it was given, too. `mask`:
  // the padding mask that the model was given, or None; `is_mask_shared`: layers get as many of its
  // rows as they have of hidden states. `are_megatrons`: the model and its block are entered in
  // Megatron's forwards. `is_settled`: how they are entered is known; until then nothing is noted.
  pybind11::object enter(const pybind11::object& params, int64_t tokens,
                         const pybind11::object& mask, bool is_mask_shared, bool are_megatrons,
                         bool is_settled);
  // Before a pack of `tokens` rows runs as it was given: raises RuntimeError where ranks of other
  // packs run others.
  void require_rows(int64_t tokens, EagerReason reason) const;
  // Takes what a block was given beside hidden states: a rotary table, and the padding mask of
  // Megatron's. False where a micro-batch's variant takes others: it runs as given, and is counted.
  bool take(MicroBatch& batch, const pybind11::object& hidden_states, const pybind11::object& table,
            const pybind11::object& mask);
  void run_as_given(MicroBatch& batch, const pybind11::object& hidden_states,
                    const pybind11::object& table);
  // Has one run eager that has leased a slot, and whose layers are called with something else than
  // the constants of its variant. If the model itself has another table by now, graphs are made of
  // it.
  void turn_eager(Constants& constants, MicroBatch& batch, const pybind11::object& hidden_states,
                  const pybind11::object& table, std::optional<at::Tensor> mask);
  // Leases a slot for a micro-batch that is to replay, and returns the index of its variant; none
  // for one that runs eager. Such a one has a reason, beside what graphs know whether its state
  // does; it is counted, and its state remembered.
  std::optional<int> begin(MicroBatch& batch);
  // The layers' state of now is the micro-batch's: what has changed it is ours.
  void expect_state(MicroBatch& batch);
  // Ends the micro-batch that has leased one, and counts it; as eager, if a reason was found since.
  void end(const MicroBatch& batch);
  // Counts a micro-batch in which every layer runs eager.
  void count_eager(EagerReason reason);
  const Counts& counts() const { return counts_; }
  int64_t replayed_tokens() const { return replayed_tokens_; }  // with those of padding
  // The most of each number that a pack had which no capacity holds; none if all were held.
  const std::optional<Capacity>& most_needed() const { return most_needed_; }

 private:
  // A pack that some graph may take, or the reason against it.
  struct Found {
    std::optional<EagerReason> against;
    PackShape shape{};
    PackForm form{};
    std::optional<Capacity> capacity{};
    std::optional<EagerReason> misfit{};  // padded to rows that all need, it fits no capacity
  };

  void stage_freqs();
  Found find(const pybind11::object& params, int64_t tokens) const;
  bool may_positions_go_on(const PackShape& shape) const;
  // Those for packs that do not say how many ranks share them.
  const std::vector<Capacity>& known() const;
  int variant_of(const VariantKey& key) const;  // -1 for none
  // Inside of its block, whose layers are called with something else, on all ranks alike.
  void leave_graphs(MicroBatch& batch) const;
  void observe(const pybind11::object& params, int64_t tokens);
  std::optional<int64_t> known_cp_size(const pybind11::object& params) const;
  std::optional<EagerReason> eager_reason_of_step(bool is_skipped, bool grad) const;
  // Whether the state is that of the last boundary, where ranks have said theirs.
  bool is_state_agreed(const VariantKey& key) const { return key.state == states_.current(); }
  // Whether all that share the pack run an eager micro-batch eager: it was said before the step, or
  // shows on each. Else this rank may be the only one.
  bool is_eager_agreed(const MicroBatch& batch) const;
  EagerReason explain(const VariantKey& kind, EagerReason reason);
  void count(const MicroBatch& batch);
  std::shared_ptr<CanonicalPacks> packs_of(const VariantKey& key);

  const DispatchOptions options_;
  std::shared_ptr<const BatchRules> rules_;
  States states_;
  DueVariants due_;
  std::map<int64_t, std::vector<Capacity>> capacities_;
  pybind11::dict groups_;
  std::shared_ptr<GraphBank> bank_;
  int64_t calls_ = 0;  // of its sites in each micro-batch
  std::map<VariantKey, int> variants_;
  std::map<VariantKey, EagerReason> eager_variants_;
  std::shared_ptr<ModuleWatch> watch_;
  // A hash of what the layers have to be in while the running micro-batch replays; else none.
  const std::shared_ptr<std::optional<size_t>> state_ = std::make_shared<std::optional<size_t>>();
  std::optional<EagerReason> refused_, reason_, gradients_reason_;
  bool is_suspended_ = false;
  std::map<int64_t, int64_t> numbers_;  // micro-batches of the step, by the ranks that share them
  std::map<PackShape, int64_t> observed_;
  int64_t expected_tokens_ = 0;
  int evaluations_ = 0;  // before anybody trained
  bool trains_ = false, is_of_evaluations_ = false;
  bool counts_packs_ = false;  // all of them, for which a long run has no memory
  std::map<VariantKey, std::shared_ptr<CanonicalPacks>> made_;
  pybind11::object params_type_ = pybind11::none();
  pybind11::set host_names_, read_names_;
  bool has_new_arguments_ = false;
  int tables_to_come_ = 4;  // for which graphs are made anew: one may be new in each step
  Counts counts_;
  int64_t replayed_tokens_ = 0;
  mutable std::optional<Capacity> most_needed_;
};

}  // namespace megagraph
