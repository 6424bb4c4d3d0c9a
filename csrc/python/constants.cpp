// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/constants.h"

#include <ATen/Functions.h>

#include "csrc/torch/python_tensors.h"

namespace py = pybind11;

namespace megagraph {
namespace {

bool have_equal_entries(const at::Tensor& one, const at::Tensor& other) {
  const py::gil_scoped_release no_gil;
  return one.sizes() == other.sizes() && one.scalar_type() == other.scalar_type() &&
         at::equal(one, other);
}

}  // namespace

bool are_equal(const py::handle& one, const py::handle& other) {
  if (is_tensor(one.ptr()) && is_tensor(other.ptr())) {
    return have_equal_entries(tensor_of(one.ptr()), tensor_of(other.ptr()));
  }
  if (PyTuple_Check(one.ptr()) && PyTuple_Check(other.ptr())) {
    const Py_ssize_t size = PyTuple_GET_SIZE(one.ptr());
    bool is_same = size == PyTuple_GET_SIZE(other.ptr());
    for (Py_ssize_t i = 0; is_same && i < size; ++i) {
      is_same = are_equal(PyTuple_GET_ITEM(one.ptr(), i), PyTuple_GET_ITEM(other.ptr(), i));
    }
    return is_same;
  }
  return Py_TYPE(one.ptr()) == Py_TYPE(other.ptr()) && one.equal(other);
}

Constants::Constants(const py::dict& values) {
  for (const auto& [name, value] : values) {
    set(py::reinterpret_borrow<py::str>(name), py::reinterpret_borrow<py::object>(value));
  }
}

void Constants::set(const py::str& name, const py::object& value) {
  values_[name] = value;
  if (is_tensor(value.ptr())) marks_[name.cast<std::string>()] = mark_of(tensor_of(value.ptr()));
}

// One of inference mode counts no writes, and is compared each time.
Constants::Mark Constants::mark_of(const at::Tensor& tensor) {
  if (tensor.is_inference()) return std::nullopt;
  return {{static_cast<int64_t>(tensor._version()),
           reinterpret_cast<int64_t>(tensor.const_data_ptr())}};
}

bool Constants::is_written(const py::handle& name, PyObject* constant) const {
  return is_tensor(constant) && marks_.at(name.cast<std::string>()) != mark_of(tensor_of(constant));
}

bool Constants::are(const py::dict& arguments) {
  size_t given = 0;
  for (const auto& [name, value] : arguments) {
    if (value.is_none()) continue;
    ++given;
    if (!has(name, value)) return false;
  }
  return given == values_.size();
}

bool Constants::hold(const py::dict& arguments) {
  for (const auto& [name, value] : arguments) {
    if (!(value.is_none() && !values_.contains(name)) && !has(name, value)) return false;
  }
  return true;
}

bool Constants::has(const py::handle& name, const py::handle& value) {
  PyObject* const known = PyDict_GetItemWithError(values_.ptr(), name.ptr());
  if (known == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return (known == value.ptr() && !is_written(name, known)) || is_equal(name, value);
}

bool Constants::is_equal(const py::handle& name, const py::handle& value) {
  PyObject* const known = PyDict_GetItemWithError(values_.ptr(), name.ptr());
  if (known == nullptr || !is_tensor(known) || !is_tensor(value.ptr())) return false;
  if (is_written(name, known)) return false;
  // No constant has a history, and who asks for a gradient may not read one.
  if (at::GradMode::is_enabled() && tensor_of(value.ptr()).requires_grad()) return false;
  const at::Tensor constant = tensor_of(known), tensor = tensor_of(value.ptr());
  const std::array marks{mark_of(tensor), mark_of(constant)};
  const auto place = name.cast<std::string>();
  const auto before = equal_.find(place);
  const bool is_known = before != equal_.end() && before->second.tensor.is_same(tensor) &&
                        before->second.marks == marks && marks[0] && marks[1];
  if (!is_known && !have_equal_entries(tensor, constant)) return false;
  equal_[place] = {tensor, marks};
  return true;
}

}  // namespace megagraph
