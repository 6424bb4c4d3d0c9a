// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/fingerprint.h"

#include <array>

#include "csrc/torch/accumulator_hooks.h"
#include "csrc/torch/python_tensors.h"

namespace py = pybind11;

namespace megagraph {
namespace {

class Hash {
 public:
  explicit Hash(size_t seed = 0) : value_(seed) {}
  void mix(size_t value) {
    value_ ^= value + 0x9e3779b97f4a7c15ULL + (value_ << 6) + (value_ >> 2);
  }
  void mix(const void* pointer) { mix(reinterpret_cast<size_t>(pointer)); }
  size_t value() const { return value_; }

 private:
  size_t value_;
};

// Borrowed; null where `owner` has no such entry, or none that is a dictionary.
PyObject* table(PyObject* owner, const py::str& name) {
  PyObject* found = PyDict_GetItemWithError(owner, name.ptr());
  if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return found != nullptr && PyDict_Check(found) ? found : nullptr;
}

void mix_address(Hash& hash, const at::Tensor& tensor) {
  const bool stored = tensor.has_storage() && tensor.storage().nbytes() > 0;
  hash.mix(stored ? tensor.const_data_ptr() : nullptr);
}

void mix_parameter(Hash& hash, PyObject* object) {
  static const auto* main_grad = new py::str("main_grad");
  if (!is_tensor(object)) return;
  const at::Tensor& param = tensor_of(object);
  mix_address(hash, param);
  hash.mix(param.requires_grad() ? 1 : 2);
  hash.mix(static_cast<size_t>(count_accumulator_hooks(param)));
  for (PyObject* hooks : tensor_hook_tables(object)) {
    hash.mix(hooks != nullptr && PyDict_Check(hooks) ? PyDict_Size(hooks) : 0);
  }
  PyObject* grad = PyObject_GetAttr(object, main_grad->ptr());
  if (grad == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
    PyErr_Clear();
  } else {
    const auto held = py::reinterpret_steal<py::object>(grad);
    hash.mix(grad);
    if (is_tensor(grad)) mix_address(hash, tensor_of(grad));
  }
}

// The tables of hooks are those of MODULE_HOOKS in megagraph/bank/eligibility.py.
void mix_module(Hash& hash, PyObject* module) {
  static const auto* parameters = new py::str("_parameters");
  static const auto* buffers = new py::str("_buffers");
  static const auto* submodules = new py::str("_modules");
  static const auto* hook_tables =
      new std::array<py::str, 4>{py::str("_forward_hooks"), py::str("_forward_pre_hooks"),
                                 py::str("_backward_hooks"), py::str("_backward_pre_hooks")};
  const auto attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  if (!attributes) throw py::error_already_set();
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  if (PyObject* found = table(attributes.ptr(), *parameters)) {
    while (PyDict_Next(found, &position, &key, &value)) {
      hash.mix(value);
      mix_parameter(hash, value);
    }
  }
  position = 0;
  if (PyObject* found = table(attributes.ptr(), *buffers)) {
    while (PyDict_Next(found, &position, &key, &value)) {
      if (is_tensor(value)) mix_address(hash, tensor_of(value));
    }
  }
  position = 0;
  if (PyObject* found = table(attributes.ptr(), *submodules)) {
    while (PyDict_Next(found, &position, &key, &value)) hash.mix(value);
  }
  for (const py::str& name : *hook_tables) {
    PyObject* found = table(attributes.ptr(), name);
    hash.mix(found == nullptr ? 0 : PyDict_Size(found));
    position = 0;
    while (found != nullptr && PyDict_Next(found, &position, &key, &value)) {
      hash.mix(static_cast<size_t>(PyObject_Hash(key)));
    }
  }
}

}  // namespace

std::pair<size_t, size_t> fingerprint(const std::vector<at::Tensor>& tensors) {
  Hash addresses(tensors.size()), flags(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    mix_address(addresses, tensor);
    flags.mix(tensor.requires_grad() ? 1 : 2);
  }
  return {addresses.value(), flags.value()};
}

size_t module_fingerprint(const py::sequence& modules) {
  Hash hash;
  for (const py::handle reference : modules) {
    const auto module = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(reference.ptr()));
    if (!module) throw py::error_already_set();
    if (module.is_none()) {
      hash.mix(size_t{3});
    } else {
      mix_module(hash, module.ptr());
    }
  }
  return hash.value();
}

}  // namespace megagraph
