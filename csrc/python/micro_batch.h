// SPDX-License-Identifier: Apache-2.0
// One micro-batch on its way through a model chunk: what was given, what was decided.
//
// An eager micro-batch that a capacity holds runs on the canonical pack as well: it is the
// reference whose bits graphs have. If no layer could be captured that would gain nothing, and its
// pack runs as it was given.
//
// Under sequence parallelism ranks share the rows between the layers, so that no rank's rows end
// where the pack does. Such a pack is padded where the model is entered, token ids, positions and
// labels, and the losses of the rows that were added are cut off.
//
// A padding mask is staged like the offsets, and so are rotary frequencies if they have a row for
// each token; layers that run eager get the same ones. What is none of the variant's has its
// micro-batch run as it was given.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/decide/eager_reason.h"
#include "csrc/python/canonical_packs.h"

namespace megagraph {

// What all micro-batches of a model have in common.
struct BatchRules {
  int64_t extra_seqs = 0;  // documents that the convention of the tail adds
  // The model's rotary tables have as many rows as a pack's longest document.
  bool depends_on_longest = false;
  // Ranks of other packs run the capacity's rows, and so must every micro-batch.
  bool needs_equal_rows = false;
  // Layers are given a padding mask in any case, of the rows past the pack's end.
  bool masks_tail = false;
  // Ranks share the rows of hidden states, so that packs are padded before the embedding and cut
  // after the output layer, and nothing is done in between.
  bool pads_at_entry = false;
  // Asked with a rotary table, the pack that the model was given and hidden states: whether the
  // model made the table. None where no table matters.
  pybind11::object is_own_table = pybind11::none();
  // Null where rotary tables have a row for each position. If frequencies have one for each token,
  // a tensor or a tuple of them as the first ones were, without rows; None before these.
  std::shared_ptr<pybind11::object> freqs = nullptr;
};

// Whether it is a padding mask that graphs take: bool [1, rows], True in rows of padding.
bool is_mask(const pybind11::handle& mask, int64_t rows, c10::Device device);

// Raises RuntimeError where a pack that is not padded has not the rows that other ranks run.
void require_rows(int64_t rows, int64_t tokens, EagerReason reason);

// The tensors of rotary frequencies; none where these are anything but a tensor or a tuple of them.
std::vector<at::Tensor> freqs_in(const pybind11::object& table);

class MicroBatch {
 public:
  // `of_pack`: what staging reads of it: offsets, `seq_idx`, offsets of this rank's rows, as far as
  // there are any. The key has no capacity while these are to be learned: then
  // it has no canonical pack.
  MicroBatch(std::shared_ptr<const BatchRules> rules, std::shared_ptr<CanonicalPacks> packs,
             pybind11::object params, int64_t tokens, std::optional<EagerReason> reason,
             std::vector<at::Tensor> of_pack, bool is_due = false);

  const VariantKey& key() const { return packs_->key(); }
  const pybind11::object& python_key() const { return packs_->python_key(); }
  const Capacity& capacity() const { return key().capacity.value(); }
  int64_t tokens() const { return tokens_; }  // physical ones of the input
  // Why it runs eager; none replays.
  std::optional<EagerReason> reason() const { return reason_; }
  void set_reason(std::optional<EagerReason> reason) { reason_ = reason; }
  // A hash of what the layers have to be in where it enters its block.
  size_t state() const { return state_; }
  void set_state(size_t state) { state_ = state; }
  // There is a capacity for it, and no capture is due before it: of a kind that has no graph, in a
  // state that its step did not begin in.
  bool is_ready() const { return key().capacity && !is_due_; }
  // The pack as layers that run on it get it.
  const pybind11::object& params() const { return params_; }
  // With frequencies, and the mask behind everything else, if it has any.
  std::vector<at::Tensor> sources() const;
  // The padding mask that the block was given, of this rank's rows.
  const std::optional<at::Tensor>& mask() const { return mask_; }
  // Rows to add to each row list of the model's input.
  int64_t entry_padding() const { return entry_padding_; }
  // Layers run on the pack as it was given.
  bool is_as_given() const { return is_as_given_; }

  // Before a model of Megatron's is entered: runs eager on its own pack, with our RoPE if unfused.
  // False where there is no such: Megatron's takes a tail.
  bool run_as_given(EagerReason reason);
  // Inside of the model: lets the layers run on `given_params()`. Rows that were added where the
  // model was entered stay.
  void run_as_given(bool is_own_table);
  // Whether the model has made a rotary table that its layers are handed. `hidden_states`: what the
  // block was given.
  bool is_own(const pybind11::object& table, const pybind11::object& hidden_states);
  // The pack as it was given, for layers that run on it. The model's own table has the rows of the
  // capacity's longest document, so that RoPE is ours. What a table of the host's means Megatron
  // knows alone. Raises RuntimeError where a host has made the table of rows that were added where
  // the model was entered.
  pybind11::object given_params(bool is_own_table) const;

  // The canonical pack, for layers that run eager; made at the first request. The pack as it was
  // given where that is what runs.
  pybind11::object canonical_params();
  // What the model is given: the canonical pack's constants and the offsets as given. It is what
  // the code around the layers needs, and costs no work on the device. The pack as it was given
  // where that was decided before.
  pybind11::object constant_params();

  // Before the model is entered: puts `constant_params()` into what it is given, by name. Where the
  // canonical pack is padded at entry it also gets that one's padding mask, if it has any, and row
  // lists, [1, T] each, get the capacity's rows, of which those that are added hold zeros.
  void enter(const pybind11::dict& given, const pybind11::tuple& row_lists);
  // Takes rotary frequencies that the block was given, if the variant's have a row for each token.
  // False where these are none of its.
  bool take_freqs(const pybind11::object& table);
  // Takes the padding mask that a block of Megatron's was given, or None. False where its variant
  // takes no mask, or another one.
  bool take_mask(const pybind11::object& mask, const pybind11::object& hidden_states);
  // Takes another padding mask, or none, in place of the one that there is.
  void replace_mask(std::optional<at::Tensor> mask);
  // What a layer that runs eager is given in place of the block's arguments: the pack, and of the
  // canonical one what staging writes beside the offsets.
  pybind11::dict layer_arguments();

  // Hidden states [T, 1, H] as the capacity's rows, zero past the pack's physical end.
  at::Tensor pad(const at::Tensor& hidden_states) const;
  // As many rows as were given.
  pybind11::object cut(const pybind11::object& hidden_states) const;
  // The same rows as a view, whatever they hold past the pack's end.
  at::Tensor first_rows(const at::Tensor& hidden_states) const;

  // For Python's collector: what of Python's it holds.
  std::vector<PyObject*> held() const;

 private:
  const at::Tensor& physical_offsets() const;  // whose last entry is the pack's physical end
  const at::Tensor& row_offsets() const;       // the same of this rank's rows
  bool has_all_rows(const at::Tensor& hidden_states) const;
  at::Tensor padded_mask(const std::optional<at::Tensor>& mask) const;
  std::optional<at::Tensor> canonical_mask();
  pybind11::object canonical_freqs();
  pybind11::object seq_idx() const;

  const std::shared_ptr<const BatchRules> rules_;
  const std::shared_ptr<CanonicalPacks> packs_;
  const pybind11::object given_;
  const int64_t tokens_;
  pybind11::object params_, canonical_, entered_, canonical_freqs_;  // null until they are made
  std::optional<EagerReason> reason_;
  const std::vector<at::Tensor> of_pack_;  // of the sources
  std::vector<at::Tensor> freqs_;
  std::optional<at::Tensor> mask_, canonical_mask_;
  int64_t entry_padding_ = 0;
  size_t state_ = 0;
  bool is_as_given_ = false;
  const bool is_due_;
};

}  // namespace megagraph
