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

// Python finds an interned name in a dictionary by its address. Never given back: these are asked
// for in every step, the last one included.
const py::str& interned(const char* name) {
  return *new py::str(py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name)));
}

// Borrowed; null where `owner` has no such entry.
PyObject* entry(PyObject* owner, const py::str& name) {
  PyObject* found = PyDict_GetItemWithError(owner, name.ptr());
  if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

// The same, and null where it is no dictionary.
PyObject* table(PyObject* owner, const py::str& name) {
  PyObject* found = entry(owner, name);
  return found != nullptr && PyDict_Check(found) ? found : nullptr;
}

py::object attributes_of(PyObject* object) {
  auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
  if (!attributes) throw py::error_already_set();
  return attributes;
}

// What a weak reference refers to; null where that is gone.
py::object referent(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
#else
  PyObject* found = PyWeakref_GetObject(reference);
  if (found == nullptr) throw py::error_already_set();
  return found == Py_None ? py::object() : py::reinterpret_borrow<py::object>(found);
#endif
}

// Null where the parameter has none. Megatron sets it on the parameter; only other types of
// parameters may compute it, and there an attribute that is missing costs an exception.
py::object main_grad_of(PyObject* param) {
  static const py::str& name = interned("main_grad");
  static const auto* parameter_type =
      new py::object(py::module_::import("torch.nn").attr("Parameter"));
  if (PyObject* found = entry(attributes_of(param).ptr(), name)) {
    return py::reinterpret_borrow<py::object>(found);
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(param)) == parameter_type->ptr()) return {};
  auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(param, name.ptr()));
  if (!found) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
    PyErr_Clear();
  }
  return found;
}

void mix_address(Hash& hash, const at::Tensor& tensor) {
  const bool stored = tensor.has_storage() && tensor.storage().nbytes() > 0;
  hash.mix(stored ? tensor.const_data_ptr() : nullptr);
}

void mix_parameter(Hash& hash, PyObject* object) {
  if (!is_tensor(object)) return;
  const at::Tensor& param = tensor_of(object);
  mix_address(hash, param);
  hash.mix(param.requires_grad() ? 1 : 2);
  hash.mix(static_cast<size_t>(count_accumulator_hooks(param)));
  for (PyObject* hooks : tensor_hook_tables(object)) {
    hash.mix(hooks != nullptr && PyDict_Check(hooks) ? PyDict_Size(hooks) : 0);
  }
  const py::object grad = main_grad_of(object);
  if (!grad) return;
  hash.mix(grad.ptr());
  if (is_tensor(grad.ptr())) mix_address(hash, tensor_of(grad.ptr()));
}

// The tables of hooks are those of MODULE_HOOKS in megagraph/bank/eligibility.py.
void mix_module(Hash& hash, PyObject* module) {
  static const py::str& parameters = interned("_parameters");
  static const py::str& buffers = interned("_buffers");
  static const py::str& submodules = interned("_modules");
  static const auto& hook_tables =
      *new std::array<py::str, 4>{interned("_forward_hooks"), interned("_forward_pre_hooks"),
                                  interned("_backward_hooks"), interned("_backward_pre_hooks")};
  const py::object attributes = attributes_of(module);
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  if (PyObject* found = table(attributes.ptr(), parameters)) {
    while (PyDict_Next(found, &position, &key, &value)) {
      hash.mix(value);
      mix_parameter(hash, value);
    }
  }
  position = 0;
  if (PyObject* found = table(attributes.ptr(), buffers)) {
    while (PyDict_Next(found, &position, &key, &value)) {
      if (is_tensor(value)) mix_address(hash, tensor_of(value));
    }
  }
  position = 0;
  if (PyObject* found = table(attributes.ptr(), submodules)) {
    while (PyDict_Next(found, &position, &key, &value)) hash.mix(value);
  }
  for (const py::str& name : hook_tables) {
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

size_t module_fingerprint(const py::list& modules) {
  Hash hash;
  for (const py::handle reference : modules) {
    if (const py::object module = referent(reference.ptr())) {
      mix_module(hash, module.ptr());
    } else {
      hash.mix(size_t{3});
    }
  }
  return hash.value();
}

size_t training_modes(const py::list& modules) {
  static const py::str& name = interned("training");
  Hash hash;
  for (const py::handle reference : modules) {
    const py::object module = referent(reference.ptr());
    if (!module) {
      hash.mix(size_t{1});
      continue;
    }
    PyObject* flag = entry(attributes_of(module.ptr()).ptr(), name);
    const auto held = flag == nullptr ? py::object(module.attr(name))  // a scripted module's
                                      : py::reinterpret_borrow<py::object>(flag);
    hash.mix(held.ptr() == Py_True ? size_t{2} : size_t{1});
  }
  return hash.value();
}

}  // namespace megagraph
