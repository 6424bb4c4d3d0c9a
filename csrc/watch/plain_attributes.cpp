// SPDX-License-Identifier: Apache-2.0
#include "csrc/watch/plain_attributes.h"

#include <set>

#include "csrc/watch/references.h"
#include "csrc/watch/values.h"
#include "csrc/torch/made_once.h"
#include "csrc/torch/python_tensors.h"

namespace py = pybind11;

namespace megagraph {
namespace {

// A copy, as asking for tensors and comparing may run Python. Less what each module of torch has.
py::dict attributes(const py::object& module) {
  const py::object& torchs_own = made_once(
      [] { return attributes_of(py::module_::import("torch.nn").attr("Module")().ptr()); });
  py::dict own;
  for (const auto& [name, value] : py::dict(attributes_of(module.ptr()))) {
    if (!torchs_own.contains(name)) own[name] = value;
  }
  return own;
}

// Calls `use` with each tensor of an attribute and its place in it, null if it is the attribute.
template <typename Use>
void for_each_tensor(const py::handle& value, const Use& use) {
  if (is_tensor(value.ptr())) {
    use(py::object(), value);
  } else if (PyList_Check(value.ptr()) || PyTuple_Check(value.ptr())) {
    for (size_t i = 0; i < py::len(value); ++i) {
      const py::object item = value[py::int_(i)];
      if (is_tensor(item.ptr())) use(py::int_(i), item);
    }
  } else if (PyDict_Check(value.ptr())) {
    for (const auto& [key, item] : py::reinterpret_borrow<py::dict>(value)) {
      if (is_tensor(item.ptr())) use(py::reinterpret_borrow<py::object>(key), item);
    }
  }
}

bool holds_tensor(const py::object& value) {
  bool found = false;
  if (value) for_each_tensor(value, [&](const py::object&, const py::handle&) { found = true; });
  return found;
}

bool compares_equal(PyObject* one, PyObject* other) {
  const int found = PyObject_RichCompareBool(one, other, Py_EQ);
  if (found < 0) throw py::error_already_set();
  return found != 0;
}

// Whether nobody could tell two values apart: one object, or two plain ones that are equal.
bool is_same(PyObject* before, PyObject* now) {
  if (before == now) return true;
  if (before == nullptr || now == nullptr || Py_TYPE(before) != Py_TYPE(now)) return false;
  if (!PyTuple_Check(now)) return is_plain(now) && compares_equal(before, now);
  const Py_ssize_t size = PyTuple_GET_SIZE(now);
  if (PyTuple_GET_SIZE(before) != size) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!is_same(PyTuple_GET_ITEM(before, i), PyTuple_GET_ITEM(now, i))) return false;
  }
  return true;
}

py::object content_of(const py::handle& value) {
  PyObject* const it = value.ptr();
  PyObject* content = nullptr;  // not by a method of its own, which may do anything
  if (PyList_Check(it)) {
    content = PyList_GetSlice(it, 0, PyList_GET_SIZE(it));
  } else if (PyDict_Check(it)) {
    content = PyDict_Copy(it);
  } else if (PySet_Check(it)) {
    content = PySet_New(it);
  } else {
    return {};
  }
  if (content == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(content);
}

bool has_same_content(const py::object& before, const py::object& now) {
  if (PyDict_Check(now.ptr())) {
    if (py::len(before) != py::len(now)) return false;
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(now)) {
      PyObject* const was = PyDict_GetItemWithError(before.ptr(), key.ptr());
      if (was == nullptr && PyErr_Occurred()) throw py::error_already_set();
      if (!is_same(was, value.ptr())) return false;
    }
    return true;
  }
  if (!PyList_Check(now.ptr())) return compares_equal(before.ptr(), now.ptr());
  return is_same(py::tuple(before).ptr(), py::tuple(now).ptr());
}

}  // namespace

py::dict plain_tensors(const NamedModules& modules) {
  std::set<PyObject*> known;
  for (const auto& [where, module] : modules) {
    for (const char* registered : {"parameters", "buffers"}) {
      for (const py::handle tensor : module.attr(registered)()) known.insert(tensor.ptr());
    }
  }
  py::dict found;
  for (const auto& [where, module] : modules) {
    const std::string prefix = where.empty() ? "" : where + ".";
    for (const auto& [attribute, value] : attributes(module)) {
      const std::string path = prefix + attribute.cast<std::string>();
      for_each_tensor(value, [&](const py::object& place, const py::handle& tensor) {
        if (!known.insert(tensor.ptr()).second) return;
        const auto inside = place ? "[" + py::repr(place).cast<std::string>() + "]" : std::string();
        found[py::str(path + inside)] = tensor;
      });
    }
  }
  return found;
}

PlainAttributes::PlainAttributes(NamedModules modules, py::object left_out)
    : left_out_(std::move(left_out)) {
  for (auto& [where, module] : modules) {
    Owner owner{std::move(where), module, {}};
    for (const auto& [name, value] : attributes(module)) {
      Held held{py::reinterpret_borrow<py::object>(value), content_of(value)};
      owner.before.emplace_back(py::reinterpret_borrow<py::object>(name), std::move(held));
    }
    owners_.push_back(std::move(owner));
  }
}

bool PlainAttributes::is_as_before(const Held& before, const py::object& now) {
  return is_same(before.value.ptr(), now.ptr()) &&
         (!before.content || has_same_content(before.content, now));
}

std::vector<PlainAttributes::Change> PlainAttributes::changes() const {
  std::vector<Change> found;
  for (const Owner& owner : owners_) {
    const py::dict now = attributes(owner.module);
    for (const auto& [name, before] : owner.before) {
      const py::object value = now.contains(name) ? py::object(now[name]) : py::object();
      if (!is_as_before(before, value)) {
        const bool is_tensor = holds_tensor(before.value) || holds_tensor(value);
        found.push_back({&owner, name, before, is_tensor});
      }
      if (value) PyDict_DelItem(now.ptr(), name.ptr());
    }
    for (const auto& [name, value] : now) {  // what was not there
      const auto added = py::reinterpret_borrow<py::object>(value);
      found.push_back({&owner, py::reinterpret_borrow<py::object>(name), {}, holds_tensor(added)});
    }
  }
  return found;
}

std::string PlainAttributes::in_words(const Change& change) {
  const auto quoted = [](const py::object& text) { return py::repr(text).cast<std::string>(); };
  const std::string& where = change.owner->where;
  const auto type = py::type::of(change.owner->module).attr("__name__").cast<std::string>();
  return "attribute " + quoted(change.name) + " of " + type +
         (where.empty() ? "" : " " + quoted(py::str(where))) +
         (change.is_tensor ? " was bound to another tensor; graphs update tensors in place only"
                           : " has another value after a call; graphs change no value");
}

std::optional<std::string> PlainAttributes::put_back(bool leaves_values) const {
  std::optional<std::string> said;
  for (const Change& change : changes()) {
    const bool is_left_out = left_out_.contains(change.name);
    if (!is_left_out && !said) said = in_words(change);
    if (leaves_values && !change.is_tensor && !is_left_out) continue;
    const py::object own = attributes_of(change.owner->module.ptr());
    const auto& [value, content] = change.before;
    if (!value) {
      if (PyDict_DelItem(own.ptr(), change.name.ptr()) < 0) throw py::error_already_set();
      continue;
    }
    if (PyDict_SetItem(own.ptr(), change.name.ptr(), value.ptr()) < 0) {
      throw py::error_already_set();
    }
    if (content && !has_same_content(content, value)) {
      value.attr("clear")();
      value.attr(PyList_Check(value.ptr()) ? "extend" : "update")(content);
    }
  }
  return said;
}

}  // namespace megagraph
