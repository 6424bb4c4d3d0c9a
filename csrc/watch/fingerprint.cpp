// SPDX-License-Identifier: Apache-2.0
#include "csrc/watch/fingerprint.h"

#include <array>

#include "csrc/watch/dict_events.h"
#include "csrc/watch/hash.h"
#include "csrc/watch/references.h"
#include "csrc/watch/state_items.h"
#include "csrc/torch/accumulator_hooks.h"
#include "csrc/torch/python_tensors.h"

namespace py = pybind11;

namespace megagraph {
namespace {

// A dictionary in an attribute, watched from now on; null where there is none.
PyObject* table(PyObject* owner, const py::str& name) {
  PyObject* found = entry(owner, name);
  if (found == nullptr || !PyDict_Check(found)) return nullptr;
  watch_dict(found);
  return found;
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
      return;
    }
    const py::object attributes = attributes_of(module.ptr());
    watch_dict(attributes.ptr());
    read_tensors(attributes.ptr());
    read_tables(attributes.ptr());
  }

  // By their keys, which are numbers that come once.
  void read_hooks(PyObject* hooks) {
    const bool has_some = hooks != nullptr && PyDict_Check(hooks);
    structure_.mix(has_some ? PyDict_Size(hooks) : 0);
    if (!has_some) return;
    watch_dict(hooks);
    PyObject *key = nullptr, *hook = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(hooks, &position, &key, &hook)) {
      structure_.mix(static_cast<size_t>(PyObject_Hash(key)));
    }
  }

  size_t structure() const { return structure_.value(); }

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
      const py::object own = attributes_of(value);
      watch_dict(own.ptr(), main_grad().ptr());
      PyObject* grad = entry(own.ptr(), main_grad());
      if (grad == nullptr) grad = computed(value);
      structure_.mix(grad);
      watch_.have_main_grad_.push_back(grad != nullptr && is_tensor(grad));
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
    for (const py::str& name : hook_tables) read_hooks(entry(attributes, name));
  }

  ModuleWatch& watch_;
  Hash structure_;
};

void ModuleWatch::look() {
  const uint64_t events = dict_events();
  if (kCanTellDictEvents && seen_ == events) return;
  seen_.reset();  // until everything was read
  params_.clear();
  have_main_grad_.clear();
  others_.clear();
  computed_.clear();
  Reader reader(*this);
  for (const py::handle reference : modules_) reader.read(referent(reference.ptr()));
  for (PyObject* hooks : global_hook_tables()) reader.read_hooks(hooks);
  structure_ = reader.structure();
  if (computed_.empty()) seen_ = events;
}

size_t ModuleWatch::fingerprint() {
  look();
  Hash hash(structure_);
  have_other_grads_ = false;
  for (size_t i = 0; i < params_.size(); ++i) {
    mix_parameter(hash, params_[i]);
    const bool is_other = have_main_grad_[i] && tensor_of(params_[i]).grad().defined();
    have_other_grads_ = have_other_grads_ || is_other;
  }
  for (PyObject* tensor : others_) mix_address(hash, tensor_of(tensor));
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
