// SPDX-License-Identifier: Apache-2.0
#include "csrc/watch/module_watch.h"

#include <algorithm>
#include <utility>

#include "csrc/torch/accumulators.h"
#include "csrc/torch/made_once.h"
#include "csrc/torch/python_tensors.h"
#include "csrc/watch/dict_events.h"
#include "csrc/watch/hash.h"
#include "csrc/watch/references.h"
#include "csrc/watch/serials.h"
#include "csrc/watch/state_items.h"
#include "csrc/watch/values.h"

namespace py = pybind11;

namespace megagraph {
namespace {

// Visits the keys and values of a dictionary, which is watched from now on.
template <typename Visit>
void for_each_entry(PyObject* dict, DictVersions& versions, const Visit& visit) {
  if (dict == nullptr || !PyDict_Check(dict)) return;
  watch_content(dict);
  versions.add(dict);
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value)) visit(key, value);
}

// By their keys, which are numbers that come once.
void mix_hooks(Hash& hash, PyObject* table, DictVersions& versions) {
  for_each_entry(table, versions, [&](PyObject* key, PyObject*) {
    hash.mix(static_cast<size_t>(PyObject_Hash(key)));
  });
  hash.mix(nullptr);  // ends the table
}

// Those of its gradient accumulator and its own, of which nobody has 65,536. One that trains
// without any on its accumulator may have lost some, which a frozen one does not need.
size_t count_hooks(PyObject* tensor) {
  const at::Tensor& parameter = tensor_of(tensor);
  auto counts = static_cast<size_t>(count_accumulator_hooks(parameter));
  if (counts == 0 && parameter.requires_grad()) counts = 0xffff;
  for (PyObject* hooks : tensor_hook_tables(tensor)) {
    counts = (counts << 16) + (hooks != nullptr && PyDict_Check(hooks) ? PyDict_Size(hooks) : 0);
  }
  return counts;
}

const py::str& main_grad() {
  static const py::str& name = interned("main_grad");
  return name;
}

// Of a parameter that does not hold it: null where there is none. Only other types of parameters
// compute it, and there an attribute that is missing costs an exception.
py::object computed_main_grad(PyObject* param) {
  const py::object& parameter_type =
      made_once([] { return py::object(py::module_::import("torch.nn").attr("Parameter")); });
  if (reinterpret_cast<PyObject*>(Py_TYPE(param)) == parameter_type.ptr()) return {};
  auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(param, main_grad().ptr()));
  if (!found) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
    PyErr_Clear();
  }
  return found;
}

}  // namespace

ModuleWatch::ModuleWatch(py::object find_modules, py::object find_state)
    : find_modules_(std::move(find_modules)), find_state_(std::move(find_state)) {}

bool ModuleWatch::follow() {
  const bool is_first = !submodules_.has_value();
  read();
  return std::exchange(expected_.modules, now_.modules) != now_.modules || is_first;
}

void ModuleWatch::follow_anew() {
  submodules_.reset();
  seen_.reset();
  follow();
  look();
  expected_.addresses = now_.addresses;
  if (watches_gradients_) expected_.gradients = now_.gradients;
}

void ModuleWatch::expect_hooks() {
  look();
  expected_.hooks = now_.hooks;
}

void ModuleWatch::expect_memory(bool grad) {
  look();
  expected_.addresses = now_.addresses;
  if (grad) expected_.gradients = now_.gradients;
  watches_gradients_ = watches_gradients_ || grad;
  state_ = state_of_now();
  expected_layers_ = state_watch_->layers();
  is_watching_ = true;
}

void ModuleWatch::forget_gradients() { watches_gradients_ = are_gradients_away_ = false; }

bool ModuleWatch::is_as_expected() {
  const auto of_any_hooks = [] { return std::optional(EagerReason::kForeignHook); };
  if (!is_watching_) return false;
  const auto layers = state_watch_->layers();
  return layers && layers == expected_layers_ && !difference(of_any_hooks) && !are_gradients_away_;
}

std::optional<EagerReason> ModuleWatch::difference(const OfHooks& of_hooks) {
  have_only_gradients_moved_ = false;
  look();
  const bool have_moved = watches_gradients_ && now_.gradients != expected_.gradients;
  are_gradients_away_ = have_moved && !(have_parameters_memory_ && have_gradients_memory_);
  if (now_.addresses != expected_.addresses || has_other_state()) {
    return EagerReason::kAddressMoved;
  }
  if (now_.modules != expected_.modules) return EagerReason::kParametersChanged;
  if (now_.hooks != expected_.hooks) {
    if (const auto reason = of_hooks()) return reason;
    expect_hooks();
  }
  have_only_gradients_moved_ = have_moved && !are_gradients_away_;
  if (have_only_gradients_moved_) return EagerReason::kAddressMoved;
  return {};
}

bool ModuleWatch::has_memory(bool grad) {
  look();
  return have_parameters_memory_ && (!grad || have_gradients_memory_);
}

void ModuleWatch::look() {
  read();
  Hash addresses, gradients, hooks(hook_keys_);
  bool have_memory = true, have_grads_memory = true, have_other_grads = false;
  for (const Parameter& parameter : parameters_) {
    const at::Tensor& tensor = tensor_of(parameter.tensor);
    const bool has_main_grad = parameter.main_grad != nullptr;
    hooks.mix(count_hooks(parameter.tensor));
    have_other_grads = have_other_grads || (has_main_grad && tensor.grad().defined());
    if (!parameter.is_read) continue;
    have_memory = mix_address(addresses, tensor) && have_memory;
    // Another object over the same memory would never get the gradient that graphs hand out.
    addresses.mix(tensor.unsafeGetTensorImpl());
    if (!has_main_grad) continue;
    const at::Tensor& gradient = tensor_of(parameter.main_grad);
    have_grads_memory = mix_address(gradients, gradient) && have_grads_memory;
  }
  for (PyObject* buffer : buffers_) mix_address(addresses, tensor_of(buffer));
  have_parameters_memory_ = have_memory;
  have_gradients_memory_ = have_grads_memory;
  have_other_grads_ = have_other_grads;
  now_.addresses = addresses.value();
  now_.gradients = gradients.value();
  now_.hooks = hooks.value();
}

void ModuleWatch::read() {
  const uint64_t events = dict_events();
  if (seen_ == events && is_current()) return;
  seen_.reset();  // until everything was read
  if (read_modules() != submodules_) {
    find_modules();
    submodules_ = read_modules();
  }
  if (computed_.empty()) seen_ = events;
}

void ModuleWatch::find_modules() {
  std::vector<Module> found;
  Hash hash;
  for (const py::handle item : find_modules_()) {
    const auto known = item.cast<py::tuple>();
    const py::object module = known[0];
    hash.mix(serial_of(module.ptr()));
    found.push_back({py::weakref(module), known[1].cast<bool>(), known[2].cast<bool>()});
  }
  modules_ = std::move(found);
  now_.modules = hash.value();
}

// Beside events, where these can be told.
bool ModuleWatch::is_current() {
  const auto is_known = [](const Module& module) {
    return has_attributes(module.reference.ptr(), module.attributes) &&
           module.versions.are_current();
  };
  // Parameters are there as long as no module has changed.
  return std::all_of(modules_.begin(), modules_.end(), is_known) && hooks_of_all_.are_current() &&
         std::all_of(parameters_.begin(), parameters_.end(), has_its_main_grad);
}

// Other attributes change in each step.
bool ModuleWatch::has_its_main_grad(Parameter& parameter) {
  if (!is_dict_of(parameter.tensor, parameter.attributes)) return false;
  const uint64_t version = dict_version(parameter.attributes);
  if (version == parameter.version) return true;
  PyObject* const grad = entry(parameter.attributes, main_grad());
  parameter.version = version;
  return parameter.main_grad == (grad != nullptr && is_tensor(grad) ? grad : nullptr);
}

// Returns a hash of which submodules there are, and of which modules.
size_t ModuleWatch::read_modules() {
  static const py::str& table = interned("_modules");
  parameters_.clear();
  buffers_.clear();
  computed_.clear();
  Hash submodules, hooks;
  for (Module& known : modules_) {
    const py::object module = referent(known.reference.ptr());
    submodules.mix(module.ptr());
    known.attributes = nullptr;
    known.versions.clear();
    if (!module) continue;
    const py::object attributes = attributes_of(module.ptr());
    known.attributes = attributes.ptr();
    watch_dict(attributes.ptr());
    known.versions.add(attributes.ptr());
    for_each_entry(entry(attributes.ptr(), table), known.versions,
                   [&](PyObject*, PyObject* child) { submodules.mix(child); });
    for (const py::str& name : hook_tables()) {
      mix_hooks(hooks, entry(attributes.ptr(), name), known.versions);
    }
    read_tensors(known, attributes.ptr());
  }
  hooks_of_all_.clear();
  for (PyObject* tables : global_hook_tables()) mix_hooks(hooks, tables, hooks_of_all_);
  hook_keys_ = hooks.value();
  return submodules.value();
}

void ModuleWatch::read_tensors(Module& module, PyObject* attributes) {
  static const py::str &parameters = interned("_parameters"), &buffers = interned("_buffers");
  for_each_entry(entry(attributes, parameters), module.versions,
                 [&](PyObject*, PyObject* parameter) {
                   if (is_tensor(parameter)) read_parameter(parameter, module.is_read);
                 });
  if (!module.has_read_buffers) return;
  for_each_entry(entry(attributes, buffers), module.versions, [&](PyObject*, PyObject* buffer) {
    if (is_tensor(buffer)) buffers_.push_back(buffer);
  });
}

void ModuleWatch::read_parameter(PyObject* parameter, bool is_read) {
  const py::object attributes = attributes_of(parameter);
  watch_dict(attributes.ptr(), main_grad().ptr());
  PyObject* grad = entry(attributes.ptr(), main_grad());
  if (grad == nullptr) {
    if (py::object computed = computed_main_grad(parameter)) {
      computed_.push_back(std::move(computed));
      grad = computed_.back().ptr();
    }
  }
  const bool has_grad = grad != nullptr && is_tensor(grad);
  parameters_.push_back({parameter, has_grad ? grad : nullptr, is_read, attributes.ptr(),
                         dict_version(attributes.ptr())});
}

ModuleWatch::State ModuleWatch::state_of_now() const {
  State state{find_state_()};
  for (const py::handle tensor : state.tensors) {
    state.places.emplace_back(tensor.ptr(), tensor_of(tensor.ptr()).const_data_ptr());
  }
  return state;
}

bool ModuleWatch::has_other_state() const {
  if (state_.places.empty()) return false;
  const State now = state_of_now();  // where further ones may have come
  return !std::all_of(state_.places.begin(), state_.places.end(), [&](const auto& place) {
    return std::find(now.places.begin(), now.places.end(), place) != now.places.end();
  });
}

}  // namespace megagraph
