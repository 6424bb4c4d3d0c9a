// SPDX-License-Identifier: Apache-2.0
#include "csrc/watch/state_items.h"

#include "csrc/watch/hash.h"
#include "csrc/watch/references.h"
#include "csrc/watch/serials.h"
#include "csrc/watch/values.h"
#include "csrc/torch/made_once.h"
#include "csrc/torch/python_tensors.h"

namespace py = pybind11;

namespace megagraph {
namespace {

constexpr size_t kLongestWords = 60;

const auto& global_tables() {
  static const auto& names = *new std::array<py::str, 4>{
      interned("_global_forward_hooks"), interned("_global_forward_pre_hooks"),
      interned("_global_backward_hooks"), interned("_global_backward_pre_hooks")};
  return names;
}

const auto& tensor_tables() {
  static const auto& names =
      *new std::array<py::str, 2>{interned("_parameters"), interned("_buffers")};
  return names;
}

PyObject* dict_or_null(PyObject* found) {
  return found != nullptr && PyDict_Check(found) ? found : nullptr;
}

bool is_skipped(const StateRules& rules, PyObject* name) {
  const int found = PySet_Contains(rules.skipped.ptr(), name);
  if (found < 0) throw py::error_already_set();
  return found != 0;
}

bool ends_with(PyObject* name, const py::str& end) {
  return PyUnicode_Check(name) && PyUnicode_Tailmatch(name, end.ptr(), 0, PY_SSIZE_T_MAX, 1) == 1;
}

// Whether an attribute holds a configuration, by its class or by its name. What takes no weak
// reference, as Python's SimpleNamespace, cannot be followed as one: it is part of the value.
bool holds_configuration(PyObject* name, PyObject* value) {
  const PyTypeObject* type = Py_TYPE(value);
  if (type->tp_weaklistoffset == 0) return false;
  if (is_configuration(value)) return true;
  static const py::str &call = interned("__call__"), &config = interned("config");
  const bool has_attributes = type->tp_dictoffset != 0 && !is_plain(value) &&
                              !PyType_Check(value) && !PyDict_Check(value) && !is_tensor(value);
  return has_attributes && ends_with(name, config) &&
         _PyType_Lookup(Py_TYPE(value), call.ptr()) == nullptr;
}

StateItem item_of(PyObject* name, PyObject* value, const StateRules& rules,
                  bool may_hold_configuration) {
  StateItem item{py::reinterpret_borrow<py::object>(name),
                 py::reinterpret_borrow<py::object>(value), 0};
  item.is_configuration = may_hold_configuration && holds_configuration(name, value);
  if (item.is_configuration) {
    item.hash = spread(serial_of(value));
  } else {
    ValueHasher hasher(rules.reads_scalars, item.dicts);
    item.hash = hasher(value);
    item.is_mutable = hasher.has_met_mutable();
  }
  return item;
}

void append_attributes(StateItems& items, PyObject* attributes, const StateRules& rules,
                       bool may_hold_configuration) {
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(attributes, &place, &name, &value)) {
    if (is_skipped(rules, name)) continue;
    items.push_back(item_of(name, value, rules, may_hold_configuration));
  }
}

// Those that nobody answers for. Of a copy: the question runs Python.
std::vector<py::object> foreign_hooks(PyObject* table, const py::object& is_expected_hook) {
  std::vector<py::object> found;
  if (table == nullptr || PyDict_Size(table) == 0) return found;
  for (const auto& [key, hook] : py::reinterpret_steal<py::dict>(PyDict_Copy(table))) {
    const bool is_expected = is_expected_hook(hook).cast<bool>();
    if (!is_expected) found.push_back(py::reinterpret_borrow<py::object>(hook));
  }
  return found;
}

void append_hooks(StateItems& items, const py::str& name, PyObject* table,
                  const StateRules& rules) {
  Hash hash;
  for (const py::object& hook : foreign_hooks(table, rules.is_expected_hook)) {
    hash.mix(serial_of(hook.ptr()));
  }
  if (hash.value() != 0) items.push_back({name, py::object(), hash.value()});
}

// In their order, which is that of their calls in a ModuleList.
void append_submodules(StateItems& items, const py::str& name, PyObject* table) {
  if (table == nullptr || PyDict_Size(table) == 0) return;
  Hash hash;
  PyObject *key = nullptr, *module = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(table, &place, &key, &module)) {
    const auto held = py::reinterpret_borrow<py::object>(module);
    hash.mix(static_cast<size_t>(PyObject_Hash(key)));
    hash.mix(serial_of(module));
  }
  items.push_back({name, py::object(), hash.value()});
}

const py::str& submodules() {
  static const py::str& name = interned("_modules");
  return name;
}

// Methods and values that somebody wrote: of what begins with two underscores only `__call__`.
bool is_of_interest(const py::handle name) {
  const auto text = name.cast<std::string>();
  return text.compare(0, 2, "__") != 0 || text == "__call__";
}

}  // namespace

StateItems items_of_module(const py::object& module, const StateRules& rules) {
  static const py::str &type = interned("type"), &training = interned("training");
  const py::object attributes = attributes_of(module.ptr());
  const size_t of_type = spread(serial_of(reinterpret_cast<PyObject*>(Py_TYPE(module.ptr()))));
  StateItems items{{type, py::object(), of_type}};
  append_attributes(items, attributes.ptr(), rules, true);
  append_submodules(items, submodules(), dict_or_null(entry(attributes.ptr(), submodules())));
  for (const py::str& name : hook_tables()) {
    append_hooks(items, name, dict_or_null(entry(attributes.ptr(), name)), rules);
  }
  if (entry(attributes.ptr(), training) == nullptr) {  // a scripted module computes it
    const py::object flag = module.attr(training);
    PyObject* value = flag.is(py::bool_(true)) ? Py_True : Py_False;
    items.push_back(item_of(training.ptr(), value, rules, false));
  }
  return items;
}

StateItems items_of_configuration(const py::object& configuration, const StateRules& rules) {
  StateItems items;
  append_attributes(items, attributes_of(configuration.ptr()).ptr(), rules, false);
  return items;
}

StateItems items_of_class(const py::object& type, const StateRules& rules) {
  const py::object& module =
      made_once([] { return py::object(py::module_::import("torch.nn").attr("Module")); });
  StateItems items;
  for (const py::handle base : type.attr("__mro__")) {
    const bool is_object = base.ptr() == reinterpret_cast<PyObject*>(&PyBaseObject_Type);
    if (is_object || (base.is(module) && !type.is(module))) continue;
    const py::dict own(base.attr("__dict__"));  // of references that the class holds too
    for (const auto& [name, value] : own) {
      if (is_of_interest(name) && !is_skipped(rules, name.ptr())) {
        items.push_back(item_of(name.ptr(), value.ptr(), rules, false));
      }
    }
  }
  return items;
}

StateItems items_of_global_hooks(const StateRules& rules) {
  StateItems items;
  const std::vector<PyObject*> tables = global_hook_tables();
  for (size_t i = 0; i < tables.size(); ++i) {
    append_hooks(items, global_tables().at(i), tables[i], rules);
  }
  return items;
}

const std::array<py::str, 4>& hook_tables() {
  static const auto& names =
      *new std::array<py::str, 4>{interned("_forward_hooks"), interned("_forward_pre_hooks"),
                                  interned("_backward_hooks"), interned("_backward_pre_hooks")};
  return names;
}

py::object foreign_hook(const py::object& module, const py::object& is_expected_hook) {
  std::vector<PyObject*> tables;
  if (module.is_none()) {
    tables = global_hook_tables();
  } else {
    const py::object attributes = attributes_of(module.ptr());
    for (const py::str& name : hook_tables()) {
      tables.push_back(dict_or_null(entry(attributes.ptr(), name)));
    }
  }
  for (PyObject* const table : tables) {
    const auto found = foreign_hooks(table, is_expected_hook);
    if (!found.empty()) return found.front();
  }
  return py::none();
}

std::vector<PyObject*> tables_of_module(PyObject* attributes) {
  std::vector<PyObject*> tables;
  for (const py::str& name : hook_tables()) tables.push_back(entry(attributes, name));
  tables.push_back(entry(attributes, submodules()));
  for (const py::str& name : tensor_tables()) tables.push_back(entry(attributes, name));
  return tables;
}

StateTensors tensors_of_module(PyObject* attributes) {
  StateTensors tensors;
  if (attributes == nullptr) return tensors;
  for (const py::str& table : tensor_tables()) {
    PyObject* const found = dict_or_null(entry(attributes, table));
    PyObject *name = nullptr, *tensor = nullptr;
    Py_ssize_t place = 0;
    while (found != nullptr && PyDict_Next(found, &place, &name, &tensor)) {
      if (is_tensor(tensor)) tensors.push_back({name, tensor, spread(PyObject_Hash(name))});
    }
  }
  return tensors;
}

std::vector<PyObject*> global_hook_tables() {
  const py::object& torch_modules =
      made_once([]() -> py::object { return py::module_::import("torch.nn.modules.module"); });
  const py::object attributes = torch_modules.attr("__dict__");
  std::vector<PyObject*> tables;
  for (const py::str& name : global_tables()) {
    tables.push_back(dict_or_null(entry(attributes.ptr(), name)));
  }
  return tables;
}

size_t summand(PyObject* name, size_t hash) {
  Hash sum(static_cast<size_t>(PyObject_Hash(name)));
  sum.mix(hash);
  return sum.value();
}

std::string describe(const StateItem& item) {
  const py::object& value = item.value;
  if (!value) return "others";
  if (!is_plain(value.ptr())) {
    const py::object name = py::getattr(value, "__qualname__", py::none());
    return py::isinstance<py::str>(name) ? name.cast<std::string>()
                                         : std::string("another ") + Py_TYPE(value.ptr())->tp_name;
  }
  auto words = py::repr(value).cast<std::string>();
  if (words.size() <= kLongestWords) return words;
  size_t end = kLongestWords;  // not inside of a character
  while ((words[end] & 0xc0) == 0x80) --end;
  return words.substr(0, end) + "...";
}

}  // namespace megagraph
