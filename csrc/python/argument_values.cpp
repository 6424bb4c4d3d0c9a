// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/argument_values.h"

#include <map>
#include <set>
#include <utility>

#include "csrc/bank/verify/runs.h"
#include "csrc/torch/python_tensors.h"

namespace py = pybind11;

namespace megagraph {
namespace {

constexpr int kDepth = 4;

using Values = std::vector<std::pair<std::string, py::object>>;  // by where they are

std::string quoted(const py::handle& key) { return "[" + py::repr(key).cast<std::string>() + "]"; }

bool is_a(const py::handle& value, const char* module, const char* name) {
  return py::isinstance(value, py::module_::import(module).attr(name));
}

// Tensors and plain values.
void append(Values& found, const py::handle& value, const std::string& path, int depth) {
  PyObject* const it = value.ptr();
  if (is_tensor(it) || PyLong_Check(it) || PyFloat_Check(it) || PyUnicode_Check(it)) {
    found.emplace_back(path, py::reinterpret_borrow<py::object>(value));
  } else if (depth == 0 || PyType_Check(it) || is_a(value, "torch.nn", "Module")) {
    return;
  } else if (PyList_Check(it) || PyTuple_Check(it)) {
    size_t index = 0;
    for (const py::handle item : value)
      append(found, item, path + quoted(py::int_(index++)), depth - 1);
  } else if (is_a(value, "collections.abc", "Mapping")) {
    for (const py::handle key : value) append(found, value[key], path + quoted(key), depth - 1);
  } else if (py::hasattr(value, "__dict__")) {
    for (const auto& [name, item] : py::dict(value.attr("__dict__"))) {
      append(found, item, path + "." + name.cast<std::string>(), depth - 1);
    }
  }
}

Values values_in(const py::object& arguments) {
  Values found;
  for (const auto& [name, given] : py::dict(arguments)) {
    append(found, given, name.cast<std::string>(), kDepth);
  }
  return found;
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.is_meta() ? nullptr : tensor.storage().data();
}

bool is_same(const py::object& value, const py::object& other) {
  if (value.is(other)) return true;
  if (!is_tensor(value.ptr()) || !is_tensor(other.ptr())) {
    return Py_TYPE(value.ptr()) == Py_TYPE(other.ptr()) && value.equal(other);
  }
  const at::Tensor &one = tensor_of(value.ptr()), &two = tensor_of(other.ptr());
  if (one.device() != two.device()) return false;
  if (!one.is_meta()) return have_same_bits(one, two);
  return one.sizes() == two.sizes() && one.scalar_type() == two.scalar_type();
}

}  // namespace

std::vector<at::Tensor> tensors_in(const py::object& arguments) {
  std::vector<at::Tensor> found;
  for (const auto& [path, value] : values_in(arguments)) {
    if (is_tensor(value.ptr())) found.push_back(tensor_of(value.ptr()));
  }
  return found;
}

std::optional<std::string> computed_argument(const py::object& arguments, const py::object& others,
                                             const std::vector<at::Tensor>& buffers) {
  std::set<const void*> ours;
  for (const at::Tensor& buffer : buffers) ours.insert(storage_of(buffer));
  ours.erase(nullptr);
  std::map<std::string, py::object> made;
  for (auto& [path, value] : values_in(others)) made.emplace(path, value);
  for (const auto& [path, value] : values_in(arguments)) {
    if (is_tensor(value.ptr()) && ours.count(storage_of(tensor_of(value.ptr()))) != 0) continue;
    const auto other = made.find(path);
    if (other == made.end() || !is_same(value, other->second)) return path;
  }
  return {};
}

}  // namespace megagraph
