// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/pack_reader.h"

#include <ATen/ops/floor_divide.h>

#include <algorithm>

#include "csrc/watch/references.h"
#include "csrc/torch/python_tensors.h"

namespace py = pybind11;

namespace megagraph {
namespace {

// Null where the object has no such attribute; no error is made for it.
py::object find_attribute(const py::handle& object, const py::str& name) {
  PyObject* found = nullptr;
#if PY_VERSION_HEX >= 0x030d0000
  const int status = PyObject_GetOptionalAttr(object.ptr(), name.ptr(), &found);
#else
  const int status = _PyObject_LookupAttr(object.ptr(), name.ptr(), &found);
#endif
  if (status < 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

py::object attribute(const py::handle& object, const py::str& name) {
  PyObject* found = PyObject_GetAttr(object.ptr(), name.ptr());
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

// None where the object has no such attribute: older releases lack some fields.
py::object attribute_or_none(const py::handle& object, const py::str& name) {
  py::object found = find_attribute(object, name);
  return found ? found : py::none();
}

struct Fields {
  const py::str &qkv_format = interned("qkv_format"), &q = interned("cu_seqlens_q"),
                &kv = interned("cu_seqlens_kv"), &q_padded = interned("cu_seqlens_q_padded"),
                &kv_padded = interned("cu_seqlens_kv_padded"), &longest = interned("max_seqlen_q"),
                &longest_kv = interned("max_seqlen_kv"), &between = interned("pad_between_seqs"),
                &cp_group = interned("cp_group"), &cp_size = interned("local_cp_size"),
                &seq_idx = interned("seq_idx"), &thd = interned("thd"), &numel = interned("numel"),
                &sample = interned("tokens_per_sample");
};

const Fields& fields() {
  static const Fields& known = *new Fields;
  return known;
}

int64_t numel(const py::object& tensor) {
  if (is_tensor(tensor.ptr())) return tensor_of(tensor.ptr()).numel();
  const py::object count = find_attribute(tensor, fields().numel);
  return count ? count().cast<int64_t>() : 1;  // of a list, which has no form
}

bool is_int(const py::object& value) { return PyLong_CheckExact(value.ptr()) != 0; }

int64_t integer(const py::object& value) {
  const py::object number = is_int(value) ? value : py::object(py::int_(value));
  const int64_t found = PyLong_AsLongLong(number.ptr());
  if (found == -1 && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

// None for what is missing or lives on the device, and for what is no integer: that `is_odd`.
std::optional<int64_t> known_integer(const py::object& value, bool* is_odd = nullptr) {
  if (value.is_none() || (is_tensor(value.ptr()) && tensor_of(value.ptr()).is_cuda())) {
    return std::nullopt;
  }
  try {
    return integer(value);
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    if (is_odd != nullptr) *is_odd = true;
    return std::nullopt;
  }
}

// One object, or tensors that are views of the same entries.
bool are_same(const py::object& one, const py::object& other) {
  if (one.is(other)) return true;
  if (!is_tensor(one.ptr()) || !is_tensor(other.ptr())) return false;
  const at::Tensor &a = tensor_of(one.ptr()), &b = tensor_of(other.ptr());
  return a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

}  // namespace

std::optional<int64_t> longest_document(const py::handle& params) {
  return known_integer(attribute(params, fields().longest));
}

std::optional<PackShape> pack_shape(const py::handle& params, int64_t tokens, int64_t extra_seqs,
                                    int64_t cp_size) {
  if (params.is_none()) return std::nullopt;
  const py::object format = attribute(params, fields().qkv_format);
  if (!format.is(fields().thd) && !format.equal(fields().thd)) return std::nullopt;
  const py::object offsets = attribute(params, fields().q);
  if (offsets.is_none()) return std::nullopt;
  const py::object padded = attribute(params, fields().q_padded);
  // Physical documents may be more: of padding alone.
  const int64_t entries = std::max(numel(offsets), is_tensor(padded.ptr()) ? numel(padded) : 0);
  const int64_t longest = longest_document(params).value_or(tokens * cp_size);
  return PackShape{tokens, entries - 1 + extra_seqs, std::max<int64_t>(longest, 1), cp_size};
}

std::optional<PackForm> pack_form(const py::handle& params, std::optional<c10::Device> device) {
  const auto are_offsets = [device](const py::object& given) {
    if (!is_tensor(given.ptr())) return false;
    const at::Tensor& offsets = tensor_of(given.ptr());
    return offsets.scalar_type() == at::kInt && offsets.dim() == 1 && offsets.numel() > 0 &&
           offsets.is_contiguous() && !offsets.is_neg() && (!device || offsets.device() == *device);
  };
  const py::object q = attribute(params, fields().q), kv = attribute(params, fields().kv);
  if (!are_offsets(q) || !are_same(q, kv)) return std::nullopt;
  const py::object q_padded = attribute(params, fields().q_padded);
  const py::object kv_padded = attribute(params, fields().kv_padded);
  if (!are_same(q_padded, kv_padded)) return std::nullopt;
  if (!q_padded.is_none() && !are_offsets(q_padded)) return std::nullopt;
  bool is_odd = false;
  const auto longest = known_integer(attribute(params, fields().longest), &is_odd);
  const auto longest_kv = known_integer(attribute(params, fields().longest_kv), &is_odd);
  if (is_odd || (longest && longest_kv && *longest != *longest_kv)) return std::nullopt;
  const bool is_aliased = q_padded.is(q) && kv_padded.is(kv);
  const bool has_padded = !q_padded.is_none() && !is_aliased;
  const py::object between = attribute_or_none(params, fields().between);
  if (!between.is_none() && !PyBool_Check(between.ptr())) return std::nullopt;
  const bool has_seq_idx = !attribute_or_none(params, fields().seq_idx).is_none();
  PackForm form{has_padded, is_aliased, std::nullopt, has_seq_idx};
  if (!between.is_none()) form.pad_between_seqs = between.ptr() == Py_True;
  return form;
}

std::vector<at::Tensor> pack_sources(const py::handle& params, const PackForm& form,
                                     int64_t cp_size) {
  const auto tensor = [&](const py::str& name) { return tensor_of(attribute(params, name).ptr()); };
  std::vector<at::Tensor> sources{tensor(fields().q)};
  if (form.has_padded) sources.push_back(tensor(fields().q_padded));
  const at::Tensor physical = sources.back();
  if (form.has_seq_idx) sources.push_back(tensor(fields().seq_idx));
  if (cp_size > 1) sources.push_back(at::floor_divide(physical, cp_size));
  return sources;
}

bool is_of_samples(const py::handle& params) {
  return !attribute_or_none(params, fields().sample).is_none();
}

bool is_seq_idx_stageable(const py::handle& params, int64_t tokens) {
  const py::object given = attribute(params, fields().seq_idx);
  const py::object offsets = attribute(params, fields().q);
  if (!is_tensor(given.ptr()) || !is_tensor(offsets.ptr())) return false;
  const at::Tensor& index = tensor_of(given.ptr());
  return index.scalar_type() == at::kInt && index.is_contiguous() && index.dim() == 2 &&
         index.size(0) == 1 && index.size(1) == tokens &&
         index.device() == tensor_of(offsets.ptr()).device();
}

py::object cp_group_of(const py::handle& params) {
  return attribute_or_none(params, fields().cp_group);
}

std::optional<int64_t> local_cp_size(const py::handle& params) {
  const py::object size = attribute_or_none(params, fields().cp_size);
  return size.is_none() ? std::nullopt : std::optional(integer(size));
}

bool has_own_ranks(const py::handle& params, int64_t cp_size) {
  const int64_t own = local_cp_size(params).value_or(cp_size);
  return !cp_group_of(params).is_none() || own != cp_size;
}

}  // namespace megagraph
