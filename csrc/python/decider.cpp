// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/decider.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

namespace py = pybind11;

namespace megagraph {
namespace {

// More would be states that are new in each step, which have no graphs.
constexpr size_t kMostKeys = 256;

}  // namespace

Decider::Decider(int64_t extra_seqs, bool depend_on_longest, bool are_cut, py::list reasons,
                 py::object make_key)
    : extra_seqs_(extra_seqs),
      depend_on_longest_(depend_on_longest),
      are_cut_(are_cut),
      reasons_(std::move(reasons)),
      make_key_(std::move(make_key)) {}

void Decider::set_capacities(const py::dict& by_cp_size) {
  keys_.clear();  // which know capacities by address
  banks_.clear();
  for (const auto& [cp_size, capacities] : by_cp_size) {
    Bank& bank = banks_[cp_size.cast<int64_t>()];
    for (const py::handle each : capacities) {
      const auto size = [&](const char* name) { return each.attr(name).cast<int64_t>(); };
      bank.capacities.push_back({size("tokens"), size("num_seqs"), size("max_seqlen")});
      bank.objects.append(each);
    }
  }
}

Decider::Found Decider::find(const py::object& params, int64_t tokens, int64_t cp_size) {
  const auto against = [&](EagerReason why) { return Found{reason(why), {}, {}, {}}; };
  if (!refused_.is_none()) return Found{refused_, {}, {}, {}};
  const std::optional<int64_t> known = known_cp_size(params, cp_size);
  const auto shape = pack_shape(params, tokens, extra_seqs_, known.value_or(cp_size));
  if (!shape) return against(EagerReason::kNoPackMetadata);
  if (!known) return against(EagerReason::kCpSizeNotCaptured);
  auto form = pack_form(params);
  if (!form || (form->has_seq_idx && !is_seq_idx_stageable(params, tokens))) {
    return against(EagerReason::kSignatureChanged);
  }
  py::object capacity = py::none();
  if (!banks_.empty()) {
    const auto bank = banks_.find(*known);
    const Decision decision =
        bank == banks_.end() ? Decision{} : megagraph::decide(*shape, bank->second.capacities);
    if (decision.capacity < 0) return against(decision.reason);
    capacity = bank->second.objects[decision.capacity];
  }
  if (groups_.empty() && has_own_cp_group(params)) return against(EagerReason::kCpSizeNotCaptured);
  return Found{py::none(), std::move(capacity), *shape, std::move(*form)};
}

py::object Decider::eager_reason(const py::object& params, int64_t tokens, int64_t cp_size) {
  return find(params, tokens, cp_size).reason;
}

py::object Decider::decide(const py::object& params, int64_t tokens, bool has_mask,
                           const py::object& state_of_call, int64_t cp_size) {
  const Found found = find(params, tokens, cp_size);
  if (!found.reason.is_none()) return found.reason;
  if (c10::InferenceMode::is_enabled() || may_positions_go_on(found.shape)) {
    return reason(EagerReason::kSignatureChanged);
  }
  const PackForm& form = found.form;
  const bool grad = at::GradMode::is_enabled();
  const int64_t shared_by = found.shape.cp_size;
  const py::object state = state_of_call();
  // What a pack says of padding is None, True or False; for anything else the name is made anew.
  PyObject* between = form.pad_between_seqs.ptr();
  const bool is_known = between == Py_None || PyBool_Check(between);
  const Fields fields{
      found.capacity.ptr(),  form.has_padded, form.is_aliased, between, form.has_seq_idx, grad,
      state.cast<int64_t>(), has_mask,        shared_by};
  if (is_known) {
    if (const auto made = keys_.find(fields); made != keys_.end()) return made->second;
  }
  py::object key =
      make_key_(found.capacity, form.has_padded, form.is_aliased, form.pad_between_seqs,
                form.has_seq_idx, grad, state, has_mask, shared_by);
  if (is_known) {
    if (keys_.size() >= kMostKeys) keys_.clear();
    keys_.emplace(fields, key);
  }
  return key;
}

// Megatron's table has a row for each of the longest document's: of as many as the pack has, each
// row of the pack gets its own. Where it cuts a longer one to the pack's rows, that is so as well;
// it cuts none of packs that ranks share. In a document alone both meanings are one.
bool Decider::may_positions_go_on(const PackShape& shape) const {
  if (!depend_on_longest_ || shape.num_seqs - extra_seqs_ < 2) return false;
  const int64_t tokens = shape.tokens * shape.cp_size;
  const bool are_cut = are_cut_ && shape.cp_size == 1;
  return are_cut ? shape.max_seqlen >= tokens : shape.max_seqlen == tokens;
}

// How many ranks share a pack; none where they are in another group than graphs were captured with.
std::optional<int64_t> Decider::known_cp_size(const py::object& params, int64_t cp_size) const {
  if (groups_.empty() || params.is_none()) return cp_size;
  const py::object group = cp_group_of(params);
  const auto own = local_cp_size(params);
  if (!own) return group.is_none() ? std::optional(cp_size) : std::nullopt;
  const py::int_ size(*own);
  if (!groups_.contains(size)) return std::nullopt;
  if (*own == 1) return own;
  const auto is_given = [&](py::handle known) { return known.is(group); };
  const py::tuple known = groups_[size];
  return std::any_of(known.begin(), known.end(), is_given) ? own : std::nullopt;
}

}  // namespace megagraph
