// SPDX-License-Identifier: Apache-2.0
// Says what is due to be captured, from the kinds of micro-batches that steps have held.
//
// A kind is the key of a variant without its capacity: all capacities are captured together. Kinds
// of one family differ in the state of the layers alone: steps of all of them warm the family up,
// and each one of them is due once it has occurred. But if the first micro-batch was in a state of
// its own, that one waits until it comes again: some modules change in their first call, and are
// never again as they were before. Training takes several steps, until some variant with gradients
// has been captured; from then on everything takes one.
#pragma once

#include <cstdint>
#include <map>
#include <set>

#include "csrc/decide/variant_key.h"

namespace megagraph {

using VariantKeys = std::set<VariantKey>;

class DueVariants {
 public:
  // `warm_up_steps`: training steps before the first capture.
  explicit DueVariants(int warm_up_steps) : warm_up_steps_(warm_up_steps) {}

  // -- in a step --
  // Remembers that the running step holds micro-batches of a kind.
  void note(const VariantKey& kind);
  // Rotary frequencies turn out to have a row for each token: kinds with a table never occurred.
  void forget_tables();
  // Counts the step. Returns the kinds that have now been passed over before three of the steps
  // that held them. Those of no number (`States::of_call()`) are due for as long as steps hold
  // some.
  VariantKeys end_step();

  // -- between steps --
  // What is due in the state of now; the rest is passed over. A capture finds out whether calls of
  // some layer change its state, and the others have graphs then: so if each training step has had
  // another state, none is waited for. Before an evaluation (`grad_enabled` is false) the state of
  // now is not that of training, whose backward passes some layers cannot run in it.
  VariantKeys due_in(int64_t state, bool grad_enabled);
  // Takes kinds for captured: they have their graphs, or stay eager.
  void mark_captured(const VariantKeys& kinds);
  // Graphs are gone, all of them or those that record gradients: what was warmed up is due again.
  void forget_graphs(bool only_training);
  // Kinds in some states are as if they had never occurred.
  void forget_states(const std::set<int64_t>& states);

  // Whether some kind with gradients was captured.
  bool is_warm() const { return is_warm_; }
  // The kinds that have occurred often enough, and those of them that have no graphs.
  const VariantKeys& warmed_up() const { return warmed_up_; }
  const VariantKeys& due() const { return due_; }
  const VariantKeys& captured() const { return captured_; }
  VariantKeys captured_of_family(const VariantKey& kind) const;
  std::set<int64_t> states_with_graphs() const;

 private:
  bool has_met_again(const VariantKey& kind) const;

  const int warm_up_steps_;
  bool is_warm_ = false;
  VariantKeys of_step_, passed_over_, cold_, captured_, warmed_up_, due_;
  VariantKeys families_, only_first_;  // of each family's micro-batches only the first was of these
  std::map<VariantKey, int> steps_;    // of each family
  VariantKeys recurring_;              // families of which a kind has occurred in two steps
  std::map<VariantKey, int> steps_passed_over_;
};

}  // namespace megagraph
