// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/fingerprint.h"

#include <array>

#include "csrc/python/dict_events.h"
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

// The same, watched from now on, and null where it is no dictionary.
PyObject* table(PyObject* owner, const py::str& name) {
  PyObject* found = entry(owner, name);
  if (found == nullptr || !PyDict_Check(found)) return nullptr;
  watch_dict(found);
  return found;
}

// Watched from now on.
py::object attributes_of(PyObject* object) {
  auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
  if (!attributes) throw py::error_already_set();
  watch_dict(attributes.ptr());
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

const py::str& main_grad() {
  static const py::str& name = interned("main_grad");
  return name;
}

// Of a parameter that does not hold it: null where there is none. Only other types of parameters
// compute it, and there an attribute that is missing costs an exception.
py::object computed_main_grad(PyObject* param) {
  static const auto* parameter_type =
      new py::object(py::module_::import("torch.nn").attr("Parameter"));
  if (reinterpret_cast<PyObject*>(Py_TYPE(param)) == parameter_type->ptr()) return {};
  auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(param, main_grad().ptr()));
  if (!found) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
    PyErr_Clear();
  }
  return found;
}

constexpr size_t kEvaluates = 1, kTrains = 2;

void mix_mode(Hash& hash, const py::object& module, PyObject* attributes) {
  static const py::str& training = interned("training");
  PyObject* flag = entry(attributes, training);
  const auto held = flag == nullptr ? py::object(module.attr(training))  // a scripted module's
                                    : py::reinterpret_borrow<py::object>(flag);
  hash.mix(held.ptr() == Py_True ? kTrains : kEvaluates);
}

void mix_address(Hash& hash, const at::Tensor& tensor) {
  const bool stored = tensor.has_storage() && tensor.storage().nbytes() > 0;
  hash.mix(stored ? tensor.const_data_ptr() : nullptr);
}

void mix_parameter(Hash& hash, PyObject* object) {
  const at::Tensor& param = tensor_of(object);
  mix_address(hash, param);
  hash.mix(param.requires_grad() ? 1 : 2);
  hash.mix(static_cast<size_t>(count_accumulator_hooks(param)));
  for (PyObject* hooks : tensor_hook_tables(object)) {
    hash.mix(hooks != nullptr && PyDict_Check(hooks) ? PyDict_Size(hooks) : 0);
  }
}

}  // namespace

// Reads the dictionaries of modules.
class ModuleWatch::Reader {
 public:
  explicit Reader(ModuleWatch& watch) : watch_(watch) {}

  void read(const py::object& module) {
    if (!module) {
      structure_.mix(size_t{3});
      modes_.mix(kEvaluates);
      return;
    }
    const py::object attributes = attributes_of(module.ptr());
    read_tensors(attributes.ptr());
    read_tables(attributes.ptr());
    mix_mode(modes_, module, attributes.ptr());
  }

  size_t structure() const { return structure_.value(); }
  size_t modes() const { return modes_.value(); }

 private:
  void read_tensors(PyObject* attributes) {
    static const py::str &parameters = interned("_parameters"), &buffers = interned("_buffers");
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    PyObject* found = table(attributes, parameters);
    while (found != nullptr && PyDict_Next(found, &position, &key, &value)) {
      structure_.mix(value);
      if (!is_tensor(value)) continue;
      watch_.params_.push_back(value);
      PyObject* grad = entry(attributes_of(value).ptr(), main_grad());
      if (grad == nullptr) grad = computed(value);
      structure_.mix(grad);
      if (grad != nullptr && is_tensor(grad)) watch_.others_.push_back(grad);
    }
    position = 0;
    found = table(attributes, buffers);
    while (found != nullptr && PyDict_Next(found, &position, &key, &value)) {
      if (is_tensor(value)) watch_.others_.push_back(value);
    }
  }

  PyObject* computed(PyObject* param) {
    py::object grad = computed_main_grad(param);
    if (!grad) return nullptr;
    watch_.computed_.push_back(std::move(grad));
    return watch_.computed_.back().ptr();
  }

  // The tables of hooks are those of MODULE_HOOKS in megagraph/bank/eligibility.py.
  void read_tables(PyObject* attributes) {
    static const py::str& submodules = interned("_modules");
    static const auto& hook_tables =
        *new std::array<py::str, 4>{interned("_forward_hooks"), interned("_forward_pre_hooks"),
                                    interned("_backward_hooks"), interned("_backward_pre_hooks")};
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    PyObject* found = table(attributes, submodules);
    while (found != nullptr && PyDict_Next(found, &position, &key, &value)) structure_.mix(value);
    for (const py::str& name : hook_tables) {
      found = table(attributes, name);
      structure_.mix(found == nullptr ? 0 : PyDict_Size(found));
      position = 0;
      while (found != nullptr && PyDict_Next(found, &position, &key, &value)) {
        structure_.mix(static_cast<size_t>(PyObject_Hash(key)));
      }
    }
  }

  ModuleWatch& watch_;
  Hash structure_, modes_;
};

void ModuleWatch::look() {
  const uint64_t events = dict_events();
  if (kCanTellDictEvents && seen_ == events) return;
  seen_.reset();  // until everything was read
  params_.clear();
  others_.clear();
  computed_.clear();
  Reader reader(*this);
  for (const py::handle reference : modules_) reader.read(referent(reference.ptr()));
  structure_ = reader.structure();
  modes_ = reader.modes();
  if (computed_.empty()) seen_ = events;
}

size_t ModuleWatch::fingerprint() {
  look();
  Hash hash(structure_);
  for (PyObject* param : params_) mix_parameter(hash, param);
  for (PyObject* tensor : others_) mix_address(hash, tensor_of(tensor));
  return hash.value();
}

size_t ModuleWatch::modes() {
  if (kCanTellDictEvents) {
    look();
    return modes_;
  }
  Hash hash;
  for (const py::handle reference : modules_) {
    const py::object module = referent(reference.ptr());
    if (module) {
      mix_mode(hash, module, attributes_of(module.ptr()).ptr());
    } else {
      hash.mix(kEvaluates);
    }
  }
  return hash.value();
}

std::pair<size_t, size_t> fingerprint(const std::vector<at::Tensor>& tensors) {
  Hash addresses(tensors.size()), flags(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    mix_address(addresses, tensor);
    flags.mix(tensor.requires_grad() ? 1 : 2);
  }
  return {addresses.value(), flags.value()};
}

}  // namespace megagraph
