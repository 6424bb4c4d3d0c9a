// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/micro_batch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <torch/csrc/utils/pybind.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "csrc/bank/staging/metadata.h"
#include "csrc/torch/python_tensors.h"
#include "csrc/watch/references.h"

namespace py = pybind11;

namespace megagraph {
namespace {

at::Tensor zero_tail(const at::Tensor& x, const at::Tensor& offsets, int64_t tokens) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("megagraph::zero_tail", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymInt)>();
  return op.call(x, offsets, tokens);
}

py::object padded_offsets(const at::Tensor& offsets, int64_t slots, std::optional<int64_t> end) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("megagraph::pad_cu_seqlens", "")
          .typed<at::Tensor(const at::Tensor&, c10::SymInt, std::optional<c10::SymInt>)>();
  return py::cast(op.call(offsets, slots, end));
}

const py::str& padded_name() {
  static const py::str& name = interned("cu_seqlens_q_padded");
  return name;
}

const py::str& seq_idx_name() {
  static const py::str& name = interned("seq_idx");
  return name;
}

}  // namespace

bool is_mask(const py::handle& mask, int64_t rows, c10::Device device) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(mask.ptr())) != THPVariableClass) return false;
  const at::Tensor& given = tensor_of(mask.ptr());
  return given.scalar_type() == at::kBool && given.dim() == 2 && given.size(0) == 1 &&
         given.size(1) == rows && given.device() == device;
}

void require_rows(int64_t rows, int64_t tokens, EagerReason reason) {
  if (tokens == rows) return;
  throw std::runtime_error(
      "experts are spread over ranks and take " + std::to_string(rows) +
      " rows from each: expected a pack that is padded to them or has as many, got one of " +
      std::to_string(tokens) + " that runs as it was given (" +
      kEagerReasonNames[static_cast<size_t>(reason)] +
      "); set max_seqlen_per_dp_cp_rank to the rows of the largest pack");
}

MicroBatch::MicroBatch(std::shared_ptr<const BatchRules> rules,
                       std::shared_ptr<CanonicalPacks> packs, py::object params, int64_t tokens,
                       std::optional<EagerReason> reason, std::vector<at::Tensor> sources)
    : rules_(std::move(rules)),
      packs_(std::move(packs)),
      given_(std::move(params)),
      tokens_(tokens),
      params_(given_),
      reason_(reason),
      sources_(std::move(sources)) {
  if (rules_->pads_at_entry && key().capacity) entry_padding_ = capacity().tokens - tokens_;
}

const at::Tensor& MicroBatch::physical_offsets() const {
  return sources_[key().form.has_padded ? 1 : 0];
}

const at::Tensor& MicroBatch::row_offsets() const {
  const size_t behind = mask_ ? 2 : 1;
  return key().cp_size > 1 ? sources_[sources_.size() - behind] : physical_offsets();
}

bool MicroBatch::run_as_given(EagerReason reason) {
  if (!rules_->depends_on_longest) return false;
  reason_ = reason;
  params_ = with_canonical_mark(given_);
  entry_padding_ = 0;
  is_as_given_ = true;
  return true;
}

void MicroBatch::run_as_given(bool is_own_table) {
  params_ = given_params(is_own_table);
  is_as_given_ = true;
}

bool MicroBatch::is_own(const py::object& table, const py::object& hidden_states) {
  return rules_->is_own_table(table, constant_params(), hidden_states).cast<bool>();
}

py::object MicroBatch::given_params(bool is_own_table) const {
  if (is_own_table) return with_canonical_mark(given_);
  if (entry_padding_ != 0) {
    throw std::runtime_error(
        "with sequence parallelism the layers of a padded pack are handed a rotary table that is "
        "not the model's own; expected such tables from the first micro-batch on, or never (with "
        "experts never)");
  }
  return given_;
}

py::object MicroBatch::seq_idx() const {
  return key().form.has_seq_idx ? py::getattr(params_, seq_idx_name()) : py::none();
}

py::object MicroBatch::canonical_params() {
  if (is_as_given_) return params_;
  if (canonical_) return canonical_;
  const auto added = packs_->added_offsets();
  const int64_t slots = capacity().num_seqs;
  const py::object actual = padded_offsets(sources_[0], slots, added.at("actual"));
  py::object padded = py::none(), index = seq_idx();
  if (const auto end = added.find("padded"); end != added.end()) {
    padded = padded_offsets(physical_offsets(), slots, end->second);
  }
  if (!index.is_none()) {
    const int64_t rows = capacity().tokens - tokens_;
    index = py::cast(at::constant_pad_nd(tensor_of(index.ptr()), {0, rows}, slots));
  }
  py::object made = packs_->make_like(given_, actual, padded, index);
  mark_canonical(made);
  return canonical_ = std::move(made);
}

py::object MicroBatch::constant_params() {
  if (!entered_) {
    entered_ = is_as_given_ ? params_
                            : packs_->make_like(given_, py::cast(sources_[0]),
                                                py::getattr(given_, padded_name()), seq_idx());
  }
  return entered_;
}

std::optional<at::Tensor> MicroBatch::mask_at_entry(const std::optional<at::Tensor>& mask) const {
  return rules_->pads_at_entry && !is_as_given_ ? padded_mask(mask) : mask;
}

bool MicroBatch::take_mask(const py::object& mask, const at::Tensor& hidden_states) {
  const bool has_mask = key().has_mask;
  if (mask.is_none() && (!has_mask || is_as_given_)) return true;
  if (!has_mask || !is_mask(mask, hidden_states.size(0), hidden_states.device())) return false;
  replace_mask(tensor_of(mask.ptr()));  // a block may be called again
  return true;
}

void MicroBatch::replace_mask(std::optional<at::Tensor> mask) {
  if (mask_) sources_.pop_back();
  mask_ = std::move(mask);
  if (mask_) sources_.push_back(mask_->contiguous());
  canonical_mask_.reset();
}

std::optional<at::Tensor> MicroBatch::canonical_mask() {
  const bool has_mask = mask_.has_value() || rules_->masks_tail;
  if (!has_mask || rules_->pads_at_entry || is_as_given_) return mask_;
  if (!canonical_mask_) canonical_mask_ = padded_mask(mask_);
  return canonical_mask_;
}

at::Tensor MicroBatch::padded_mask(const std::optional<at::Tensor>& mask) const {
  const at::Tensor given = mask ? mask->flatten() : at::Tensor();
  return mask_content(capacity().tokens, given, row_offsets().slice(0, -1)).unsqueeze(0);
}

at::Tensor MicroBatch::pad(const at::Tensor& hidden_states) const {
  if (is_as_given_ && rules_->needs_equal_rows) {
    require_rows(capacity().tokens, tokens_, EagerReason::kSignatureChanged);
  }
  if (rules_->pads_at_entry || is_as_given_) return hidden_states;
  return zero_tail(hidden_states, row_offsets(), capacity().tokens);
}

bool MicroBatch::has_all_rows(const at::Tensor& hidden_states) const {
  return rules_->pads_at_entry || hidden_states.size(0) == tokens_;
}

at::Tensor MicroBatch::cut(const at::Tensor& hidden_states) const {
  if (has_all_rows(hidden_states)) return hidden_states;
  return zero_tail(hidden_states, row_offsets(), tokens_);
}

at::Tensor MicroBatch::first_rows(const at::Tensor& hidden_states) const {
  return has_all_rows(hidden_states) ? hidden_states : hidden_states.narrow(0, 0, tokens_);
}

std::vector<PyObject*> MicroBatch::held() const {
  return {given_.ptr(), params_.ptr(), canonical_.ptr(), entered_.ptr()};
}

}  // namespace megagraph
