// SPDX-License-Identifier: Apache-2.0
#include "csrc/watch/plain_attributes.h"

#include <algorithm>
#include <set>

#include "csrc/watch/references.h"
#include "csrc/watch/values.h"
#include "csrc/torch/made_once.h"
#include "csrc/torch/python_tensors.h"

namespace py = pybind11;

namespace megagraph {
namespace {

constexpr size_t kDeepestHeld = 8;

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

// With the configurations in their attributes, and in those of these, each once.
NamedModules with_configurations(NamedModules owners) {
  std::set<PyObject*> known;
  for (size_t i = 0; i < owners.size(); ++i) {
    const auto [where, owner] = owners[i];  // a copy, since more come
    const std::string prefix = where.empty() ? "" : where + ".";
    for (const auto& [name, value] : attributes(owner)) {
      if (!is_configuration(value.ptr()) || !known.insert(value.ptr()).second) continue;
      owners.emplace_back(prefix + name.cast<std::string>(),
                          py::reinterpret_borrow<py::object>(value));
    }
  }
  return owners;
}

bool is_deque(PyObject* value) {
  const py::object& type =
      made_once([] { return py::object(py::module_::import("collections").attr("deque")); });
  return PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(type.ptr()));
}

// Calls `use` with what a container holds and the key or index of each. Of a copy: `use` may run
// Python.
template <typename Use>
void for_each_item(const py::handle& value, const Use& use) {
  PyObject* const it = value.ptr();
  if (PyDict_Check(it)) {
    for (const auto& [key, item] : py::reinterpret_steal<py::dict>(PyDict_Copy(it))) {
      use(py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(item));
    }
  } else if (PyList_Check(it) || PyTuple_Check(it) || is_deque(it)) {
    size_t place = 0;
    for (const py::handle item : py::tuple(py::reinterpret_borrow<py::object>(value))) {
      use(py::int_(place++), py::reinterpret_borrow<py::object>(item));
    }
  }
}

// Finds tensors in containers, each container once: some know each other.
class TensorSearch {
 public:
  // Calls `use` with each tensor of a value and its place in it, empty if it is the value.
  template <typename Use>
  void run(const py::handle& value, const Use& use) {
    if (is_tensor(value.ptr())) {
      use(place(), value);
    } else if (keys_.size() < kDeepestHeld && met_.insert(value.ptr()).second) {
      for_each_item(value, [&](const py::object& key, const py::object& item) {
        keys_.push_back(key);
        run(item, use);
        keys_.pop_back();
      });
    }
  }

 private:
  std::string place() const {
    std::string found;
    for (const py::object& key : keys_) found += "[" + py::repr(key).cast<std::string>() + "]";
    return found;
  }

  std::vector<py::object> keys_;  // that lead to where it is
  std::set<PyObject*> met_;
};

bool holds_tensor(const py::object& value) {
  bool found = false;
  const auto note = [&](const std::string&, const py::handle&) { found = true; };
  if (value) TensorSearch().run(value, note);
  return found;
}

// -- generators of random numbers --

struct Generators {
  py::object torchs = py::module_::import("torch").attr("Generator");
  py::object torchs_default = py::module_::import("torch").attr("default_generator");
  py::object pythons = py::module_::import("random").attr("Random");
  py::object numpys = py::module_::import("numpy.random").attr("Generator");
  py::object dumps = py::module_::import("pickle").attr("dumps");
};

const Generators& generators() {
  return made_once([] { return Generators{}; });
}

// Where a generator of somebody's own stands; null of anything else.
py::object stand_of(const py::handle& value) {
  const Generators& known = generators();
  if (py::isinstance(value, known.torchs) && !value.is(known.torchs_default)) {
    return value.attr("get_state")();
  }
  if (py::isinstance(value, known.pythons)) return value.attr("getstate")();
  if (py::isinstance(value, known.numpys)) return value.attr("bit_generator").attr("state");
  return {};
}

void put_stand(const py::handle& generator, const py::object& stand) {
  const Generators& known = generators();
  if (py::isinstance(generator, known.torchs)) {
    generator.attr("set_state")(stand);
  } else if (py::isinstance(generator, known.pythons)) {
    generator.attr("setstate")(stand);
  } else {
    generator.attr("bit_generator").attr("state") = stand;
  }
}

py::object bytes_of(const py::object& stand) {
  return generators().dumps(is_tensor(stand.ptr()) ? stand.attr("numpy")() : stand);
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
  } else if (is_deque(it)) {
    content = PySequence_List(it);
  } else {
    return stand_of(value);
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
  if (PySet_Check(now.ptr())) return compares_equal(before.ptr(), now.ptr());
  if (!PyList_Check(now.ptr()) && !is_deque(now.ptr())) {
    return bytes_of(before).equal(bytes_of(stand_of(now)));
  }
  return is_same(py::tuple(before).ptr(), py::tuple(now).ptr());
}

// What a value holds that may change while it stays the same object, and what is held in that.
void append_contents(PlainAttributes::Contents& found, const py::object& value, size_t depth = 0) {
  const auto is_it = [&](const auto& each) { return each.first.is(value); };
  if (depth > kDeepestHeld || is_plain(value.ptr())) return;
  if (std::any_of(found.begin(), found.end(), is_it)) return;
  if (const py::object content = content_of(value)) found.emplace_back(value, content);
  for_each_item(value, [&](const py::object&, const py::object& item) {
    append_contents(found, item, depth + 1);
  });
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
  for (const auto& [where, module] : with_configurations(modules)) {
    const std::string prefix = where.empty() ? "" : where + ".";
    for (const auto& [attribute, value] : attributes(module)) {
      const std::string path = prefix + attribute.cast<std::string>();
      TensorSearch().run(value, [&](const std::string& inside, const py::handle& tensor) {
        if (known.insert(tensor.ptr()).second) found[py::str(path + inside)] = tensor;
      });
    }
  }
  return found;
}

PlainAttributes::PlainAttributes(NamedModules modules, py::object left_out)
    : left_out_(std::move(left_out)) {
  for (auto& [where, module] : with_configurations(std::move(modules))) {
    Owner owner{std::move(where), module, {}};
    for (const auto& [name, value] : attributes(module)) {
      Held held{py::reinterpret_borrow<py::object>(value), {}};
      append_contents(held.contents, held.value);
      owner.before.emplace_back(py::reinterpret_borrow<py::object>(name), std::move(held));
    }
    owners_.push_back(std::move(owner));
  }
}

bool PlainAttributes::is_as_before(const Held& before, const py::object& now) {
  const auto is_same_inside = [](const auto& each) {
    return has_same_content(each.second, each.first);
  };
  return is_same(before.value.ptr(), now.ptr()) &&
         std::all_of(before.contents.begin(), before.contents.end(), is_same_inside);
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
    const auto& [value, contents] = change.before;
    if (!value) {
      if (PyDict_DelItem(own.ptr(), change.name.ptr()) < 0) throw py::error_already_set();
      continue;
    }
    if (PyDict_SetItem(own.ptr(), change.name.ptr(), value.ptr()) < 0) {
      throw py::error_already_set();
    }
    for (const auto& [held, content] : contents) {
      if (has_same_content(content, held)) continue;
      if (stand_of(held)) {
        put_stand(held, content);
        continue;
      }
      held.attr("clear")();
      const bool is_sequence = PyList_Check(held.ptr()) || is_deque(held.ptr());
      held.attr(is_sequence ? "extend" : "update")(content);
    }
  }
  return said;
}

}  // namespace megagraph
