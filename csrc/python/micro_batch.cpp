// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/micro_batch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "csrc/bank/signature.h"
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

// As one object, or a tuple where others are one.
py::object freqs_of(const std::vector<at::Tensor>& tensors, const py::object& others) {
  if (!py::isinstance<py::tuple>(others)) return py::cast(tensors.at(0));
  return py::tuple(py::cast(tensors));
}

at::Tensor without_rows(const at::Tensor& t, const at::TensorOptions& options) {
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes[0] = 0;
  return at::empty(sizes, options.dtype(t.scalar_type()));
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

std::vector<at::Tensor> freqs_in(const py::object& table) {
  const auto given = py::isinstance<py::tuple>(table) ? py::tuple(table) : py::make_tuple(table);
  std::vector<at::Tensor> found;
  for (const py::handle each : given) {
    if (!is_plain_tensor(each.ptr()) || tensor_of(each.ptr()).dim() == 0) return {};
    found.push_back(tensor_of(each.ptr()));
  }
  return found;
}

MicroBatch::MicroBatch(std::shared_ptr<const BatchRules> rules,
                       std::shared_ptr<CanonicalPacks> packs, py::object params, int64_t tokens,
                       std::optional<EagerReason> reason, std::vector<at::Tensor> of_pack,
                       bool is_due)
    : rules_(std::move(rules)),
      packs_(std::move(packs)),
      given_(std::move(params)),
      tokens_(tokens),
      params_(given_),
      reason_(reason),
      of_pack_(std::move(of_pack)),
      is_due_(is_due) {
  if (rules_->pads_at_entry && key().capacity) entry_padding_ = capacity().tokens - tokens_;
}

const at::Tensor& MicroBatch::physical_offsets() const {
  return of_pack_[key().form.has_padded ? 1 : 0];
}

const at::Tensor& MicroBatch::row_offsets() const {
  return key().cp_size > 1 ? of_pack_.back() : physical_offsets();
}

std::vector<at::Tensor> MicroBatch::sources() const {
  std::vector<at::Tensor> found = of_pack_;
  found.insert(found.end(), freqs_.begin(), freqs_.end());
  if (mask_) found.push_back(mask_->contiguous());
  return found;
}

bool MicroBatch::run_as_given(EagerReason reason) {
  if (!rules_->depends_on_longest) return false;
  reason_ = reason;
  params_ = with_canonical_mark(given_, false);
  entry_padding_ = 0;
  is_as_given_ = true;
  return true;
}

void MicroBatch::run_as_given(bool is_own_table) {
  params_ = given_params(is_own_table);
  is_as_given_ = true;
}

bool MicroBatch::is_own(const py::object& table, const py::object& hidden_states) {
  // Such as are made of the rows that were added, too.
  if (key().by_token) return entry_padding_ != 0 && take_freqs(table);
  return rules_->is_own_table(table, constant_params(), hidden_states).cast<bool>();
}

py::object MicroBatch::given_params(bool is_own_table) const {
  if (is_own_table) return with_canonical_mark(given_, key().by_token);
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
  const py::object actual = padded_offsets(of_pack_[0], slots, added.at("actual"));
  py::object padded = py::none(), index = seq_idx();
  if (const auto end = added.find("padded"); end != added.end()) {
    padded = padded_offsets(physical_offsets(), slots, end->second);
  }
  if (!index.is_none()) {
    const int64_t rows = capacity().tokens - tokens_;
    index = py::cast(at::constant_pad_nd(tensor_of(index.ptr()), {0, rows}, slots));
  }
  py::object made = packs_->make_like(given_, actual, padded, index);
  mark_canonical(made, key().by_token);
  return canonical_ = std::move(made);
}

py::object MicroBatch::constant_params() {
  if (entered_) return entered_;
  if (is_as_given_) return entered_ = params_;
  entered_ = packs_->make_like(given_, py::cast(of_pack_[0]), py::getattr(given_, padded_name()),
                               seq_idx());
  if (key().by_token) {  // a host may choose frequencies by the longest document: dynamic NTK
    for (const char* longest : {"max_seqlen_q", "max_seqlen_kv"}) {
      entered_.attr(longest) = given_.attr(longest);
    }
  }
  return entered_;
}

void MicroBatch::enter(const py::dict& given, const py::tuple& row_lists) {
  static const py::str &params = interned("packed_seq_params"), &mask = interned("padding_mask");
  given[params] = constant_params();
  const auto tensor_in = [&](py::handle name) {
    return given.contains(name) ? given[name].cast<std::optional<at::Tensor>>() : std::nullopt;
  };
  if (key().has_mask && rules_->pads_at_entry && !is_as_given_) {
    given[mask] = py::cast(padded_mask(tensor_in(mask)));
  }
  if (entry_padding_ == 0) return;
  for (const py::handle name : row_lists) {
    const std::optional<at::Tensor> rows = tensor_in(name);
    if (rows) given[name] = py::cast(at::constant_pad_nd(*rows, {0, entry_padding_}));
  }
}

bool MicroBatch::take_freqs(const py::object& table) {
  if (!key().by_token) return true;
  std::vector<at::Tensor> given = freqs_in(table), like = freqs_in(*rules_->freqs);
  const bool is_first = like.empty();
  if (is_first) {
    for (const at::Tensor& t : given) like.push_back(without_rows(t, of_pack_[0].options()));
  } else if (py::isinstance<py::tuple>(table) != py::isinstance<py::tuple>(*rules_->freqs)) {
    return false;
  }
  if (given.empty() || given.size() != like.size()) return false;
  for (size_t i = 0; i < given.size(); ++i) {
    auto expected = TensorSignature::of(like[i], /*requires_grad=*/false, /*fewer_rows=*/false);
    expected.sizes[0] = tokens_ + entry_padding_;
    if (!expected.accepts(given[i])) return false;
  }
  if (is_first) *rules_->freqs = freqs_of(like, table);
  freqs_ = std::move(given);
  canonical_freqs_ = py::object();
  return true;
}

py::object MicroBatch::canonical_freqs() {
  if (canonical_freqs_) return canonical_freqs_;
  std::vector<at::Tensor> padded;
  for (const at::Tensor& t : freqs_) {
    std::vector<int64_t> rows(2 * t.dim(), 0);
    rows.back() = capacity().tokens - tokens_;
    padded.push_back(at::constant_pad_nd(t, rows));
  }
  return canonical_freqs_ = freqs_of(padded, *rules_->freqs);
}

py::dict MicroBatch::layer_arguments() {
  py::dict given;
  given["attention_mask"] = py::none();
  given["packed_seq_params"] = canonical_params();
  if (const auto mask = canonical_mask()) given["padding_mask"] = py::cast(*mask);
  if (!freqs_.empty() && !rules_->pads_at_entry && !is_as_given_) {
    given["rotary_pos_emb"] = canonical_freqs();
  }
  return given;
}

bool MicroBatch::take_mask(const py::object& mask, const py::object& hidden_states) {
  const bool has_mask = key().has_mask;
  if (mask.is_none() && (!has_mask || is_as_given_)) return true;
  if (!has_mask || !is_tensor(hidden_states.ptr())) return false;
  const at::Tensor& rows = tensor_of(hidden_states.ptr());
  if (!is_mask(mask, rows.size(0), rows.device())) return false;
  replace_mask(tensor_of(mask.ptr()));  // a block may be called again
  return true;
}

void MicroBatch::replace_mask(std::optional<at::Tensor> mask) {
  mask_ = std::move(mask);
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

py::object MicroBatch::cut(const py::object& hidden_states) const {
  if (is_tensor(hidden_states.ptr()) && has_all_rows(tensor_of(hidden_states.ptr()))) {
    return hidden_states;  // without a caster, as most
  }
  return py::cast(zero_tail(hidden_states.cast<at::Tensor>(), row_offsets(), tokens_));
}

at::Tensor MicroBatch::first_rows(const at::Tensor& hidden_states) const {
  return has_all_rows(hidden_states) ? hidden_states : hidden_states.narrow(0, 0, tokens_);
}

std::vector<PyObject*> MicroBatch::held() const {
  return {given_.ptr(), params_.ptr(), canonical_.ptr(), entered_.ptr(), canonical_freqs_.ptr()};
}

}  // namespace megagraph
