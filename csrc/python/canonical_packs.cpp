// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/canonical_packs.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <utility>

#include "csrc/torch/python_tensors.h"
#include "csrc/watch/references.h"

namespace py = pybind11;

namespace megagraph {
namespace {

struct Names {
  const py::str &actual_q = interned("cu_seqlens_q"), &actual_kv = interned("cu_seqlens_kv"),
                &padded_q = interned("cu_seqlens_q_padded"),
                &padded_kv = interned("cu_seqlens_kv_padded"), &seq_idx = interned("seq_idx"),
                &between = interned("pad_between_seqs"), &tokens = interned("total_tokens"),
                &mark = interned("_megagraph_by_token");
  std::array<const py::str*, 4> offsets{&actual_q, &actual_kv, &padded_q, &padded_kv};
};

const Names& names() {
  static const Names& known = *new Names;
  return known;
}

py::object called_with(const py::object& type, const py::dict& fields) {
  PyObject* called = PyObject_Call(type.ptr(), py::tuple().ptr(), fields.ptr());
  if (called == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(called);
}

struct PackClass {
  py::object type;      // alive, so that no other one has its address
  py::object megatron;  // of the dataclass that a host's own class extends, or of the class itself
  bool is_extended;
  std::optional<bool> can_be_made{};  // once somebody has asked
};

PackClass& of_type(const py::object& type) {
  static auto& known = *new std::map<PyObject*, PackClass>;
  const auto found = known.find(type.ptr());
  if (found != known.end()) return found->second;
  PackClass fields{type, py::dict(), false};
  for (const py::handle base : type.attr("__mro__")) {  // the last one that has some
    if (!py::hasattr(base, "__dataclass_fields__")) continue;
    fields.megatron = base.attr("__dataclass_fields__");
    fields.is_extended = !base.is(type);
  }
  return known.emplace(type.ptr(), std::move(fields)).first->second;
}

PackClass& class_of(const py::object& params) { return of_type(py::type::of(params)); }

// What others have set on a pack, beside what its class has, or have given their own class.
void hand_on_attributes(const py::object& given, const py::object& made) {
  const auto before = attributes_of(given.ptr()).cast<py::dict>();
  const auto own = attributes_of(made.ptr()).cast<py::dict>();
  const PackClass& fields = class_of(given);
  if (!fields.is_extended && before.size() <= own.size()) return;
  for (const auto& [name, value] : before) {
    if (!own.contains(name) || !fields.megatron.contains(name)) own[name] = value;
  }
}

py::object copy_of(const py::object& params) {
  return py::module_::import("copy").attr("copy")(params);
}

}  // namespace

std::vector<py::object> host_names(const py::object& params) {
  const py::object& megatrons = class_of(params).megatron;
  std::vector<py::object> names;
  const auto attributes = attributes_of(params.ptr()).cast<py::dict>();
  if (attributes.size() <= py::len(megatrons)) return names;  // as in nearly every micro-batch
  for (const auto& [name, value] : attributes) {
    if (!megatrons.contains(name)) names.push_back(py::reinterpret_borrow<py::object>(name));
  }
  return names;
}

bool can_be_made(const py::object& params) {
  PackClass& fields = class_of(params);
  if (fields.can_be_made) return *fields.can_be_made;
  py::dict given;
  try {
    for (const py::str* name : names().offsets) given[*name] = params.attr(*name);
    const py::object made = called_with(fields.type, given);
    for (const auto& [name, value] : given) py::setattr(made, name, value);
    // What a host has put on one of no such class, and what it has of itself, cannot be told apart.
    fields.can_be_made =
        _PyObject_GetDictPtr(made.ptr()) != nullptr && py::len(fields.megatron) > 0;
  } catch (const py::error_already_set&) {
    fields.can_be_made = false;
  }
  return *fields.can_be_made;
}

void mark_canonical(const py::object& params, bool by_token) {
  for (const py::str* name : names().offsets) {
    const py::object offsets = py::getattr(params, *name);
    if (!offsets.is_none()) py::setattr(offsets, names().mark, py::bool_(by_token));
  }
}

bool is_canonical(const py::handle& offsets) { return py::hasattr(offsets, names().mark); }

bool is_by_token(const py::handle& offsets) { return offsets.attr(names().mark).cast<bool>(); }

py::object with_canonical_mark(const py::object& params, bool by_token) {
  py::object marked = copy_of(params);
  std::map<PyObject*, py::object> made;
  for (const py::str* name : names().offsets) {
    const py::object offsets = py::getattr(params, *name);
    if (offsets.is_none()) continue;
    py::object& own = made[offsets.ptr()];
    if (!own) own = offsets.attr("detach")();
    py::setattr(marked, *name, own);
  }
  mark_canonical(marked, by_token);
  return marked;
}

py::object without_ranks(const py::object& params) {
  py::object plain = copy_of(params);
  for (const char* name : {"local_cp_size", "cp_group"}) plain.attr(name) = py::none();
  return plain;
}

py::object with_tail_as_document(const py::object& params, int64_t rows) {
  py::object longer = copy_of(params);
  const py::object actual = py::getattr(params, names().actual_q);
  const py::object padded = py::getattr(params, names().padded_q);
  // Unset, it follows from the offsets: whether they are two tensors.
  if (py::getattr(params, names().between).is_none()) {
    py::setattr(longer, names().between, py::bool_(!padded.is_none() && !padded.is(actual)));
  }
  const at::Tensor& valid = tensor_of(actual.ptr());
  const at::Tensor& physical = padded.is_none() ? valid : tensor_of(padded.ptr());
  const at::Tensor end = at::full_like(physical.slice(0, -1), rows);
  const py::object ends = py::cast(at::cat({valid, valid.slice(0, -1)}));
  const py::object physical_ends = py::cast(at::cat({physical, end}));
  for (const py::str* name : {&names().actual_q, &names().actual_kv}) {
    py::setattr(longer, *name, ends);
  }
  for (const py::str* name : {&names().padded_q, &names().padded_kv}) {
    py::setattr(longer, *name, physical_ends);
  }
  return longer;
}

py::object as_pack(const py::object& params, const py::object& ids,
                   const py::object& hidden_states) {
  if (params.is_none()) return params;
  const py::object format = params.attr("qkv_format");
  if (!format.equal(py::str("sbhd")) ||
      py::getattr(params, "local_cp_size", py::none()).is_none()) {
    return params;
  }
  const py::object offsets = py::getattr(params, names().actual_q);
  const bool has_ids = hidden_states.is_none();
  const auto batch = tensor_of((has_ids ? ids : hidden_states).ptr()).size(has_ids ? 0 : 1);
  const int64_t count = offsets.is_none() ? 0 : tensor_of(offsets.ptr()).numel();
  if (batch != 1 || count != 2) {
    throw py::value_error(
        "cp_sizes: expected a pack (thd), or one document (sbhd, a batch of 1, two cu_seqlens), "
        "got sbhd, a batch of " +
        std::to_string(batch) + ", " + std::to_string(count) + " cu_seqlens");
  }
  py::dict fields;
  fields["qkv_format"] = "thd";
  fields[names().actual_q] = py::cast(tensor_of(offsets.ptr()).to(at::kInt));
  fields[names().actual_kv] = fields[names().actual_q];
  // What a pack of one document says as that does.
  for (const char* name : {"max_seqlen_q", "max_seqlen_kv", "local_cp_size", "cp_group"}) {
    fields[name] = params.attr(name);
  }
  py::object pack = called_with(py::type::of(params), fields);
  hand_on_attributes(params, pack);
  return pack;
}

CanonicalPacks::CanonicalPacks(VariantKey key, int64_t extra_seqs)
    : key_(key), extra_seqs_(extra_seqs), python_key_(py::cast(key_)) {}

std::map<std::string, std::optional<int64_t>> CanonicalPacks::added_offsets() const {
  std::map<std::string, std::optional<int64_t>> added{{"actual", std::nullopt}};
  if (extra_seqs_ > 0) {
    added["padded"] = key_.capacity.value().tokens * key_.cp_size;
  } else if (key_.form.has_padded) {
    added["padded"] = std::nullopt;
  }
  return added;
}

const py::dict& CanonicalPacks::constants(const py::object& params_type) {
  const auto found = constants_.find(params_type.ptr());
  if (found != constants_.end()) return found->second.second;
  const py::object& fields = of_type(params_type).megatron;  // which differ by release
  py::dict constants;
  const auto put = [&](const char* name, const py::object& value) {
    if (fields.contains(name)) constants[interned(name)] = value;
  };
  put("qkv_format", interned("thd"));
  // Kernels choose by the longest document: alike for every pack.
  const py::int_ longest(key_.capacity.value().max_seqlen);
  put("max_seqlen_q", longest);
  put("max_seqlen_kv", longest);
  // A tail that is padded but not valid needs it said, whatever the pack said.
  const auto between = extra_seqs_ > 0 ? std::optional(true) : key_.form.pad_between_seqs;
  if (between) put("pad_between_seqs", py::bool_(*between));
  auto& added = constants_[params_type.ptr()];
  added = {params_type, std::move(constants)};
  return added.second;
}

py::object CanonicalPacks::make(const py::object& params_type, const py::object& actual,
                                const py::object& padded, const py::object& seq_idx) {
  py::dict fields;
  const py::object& physical = padded.is_none() && key_.form.is_aliased ? actual : padded;
  fields[names().actual_q] = actual;
  fields[names().actual_kv] = actual;
  fields[names().padded_q] = physical;
  fields[names().padded_kv] = physical;
  py::object made = called_with(params_type, fields);
  // A host's own constructor need not name them.
  for (const auto& [name, value] : constants(params_type)) py::setattr(made, name, value);
  if (key_.form.has_seq_idx) {  // which its constructor would wait for the device to make
    py::setattr(made, names().seq_idx, seq_idx);
    py::setattr(made, names().tokens, py::int_(key_.capacity.value().tokens));
  }
  return made;
}

py::object CanonicalPacks::make_like(const py::object& given, const py::object& actual,
                                     const py::object& padded, const py::object& seq_idx) {
  py::object made = make(py::type::of(given), actual, padded, seq_idx);
  hand_on_attributes(given, made);
  return made;
}

}  // namespace megagraph
