// SPDX-License-Identifier: Apache-2.0
#include "csrc/watch/serials.h"

#include <pybind11/pybind11.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/torch/made_once.h"
#include "csrc/watch/references.h"

namespace py = pybind11;

namespace megagraph {
namespace {

struct Known {
  py::object reference;  // weak; null where the object takes none
  const PyTypeObject* type;
  uint64_t serial;
};
struct Kept {
  py::object object;  // held, or another one might come to its address
  uint64_t serial;
};

// Under the GIL, and never destroyed: Python may be gone by then.
auto& known_objects = *new std::unordered_map<PyObject*, Known>;
auto& kept_objects = *new std::unordered_map<PyObject*, Kept>;
uint64_t last_serial = 0;
size_t next_sweep = 1024;

bool is_gone(const Known& known) { return known.reference && !referent(known.reference.ptr()); }

// Lets go of objects that are gone, whenever there are twice as many as were left the last time.
void sweep() {
  if (known_objects.size() < next_sweep) return;
  for (auto known = known_objects.begin(); known != known_objects.end();) {
    known = is_gone(known->second) ? known_objects.erase(known) : std::next(known);
  }
  next_sweep = 2 * known_objects.size() + 1024;
}

// Lets go of all that nobody else holds.
void release_kept() {
  std::vector<Kept> unused;  // whose end may run code that comes back here
  for (auto kept = kept_objects.begin(); kept != kept_objects.end();) {
    const bool is_used = Py_REFCNT(kept->first) > 1;
    if (!is_used) unused.push_back(std::move(kept->second));
    kept = is_used ? std::next(kept) : kept_objects.erase(kept);
  }
}

// Of an object that is not to be referred to weakly, and refers to no other one, which would live
// on with it.
uint64_t serial_of_kept(PyObject* object) {
  const auto found = kept_objects.find(object);
  if (found != kept_objects.end()) return found->second.serial;
  const uint64_t serial = ++last_serial;
  kept_objects.emplace(object, Kept{py::reinterpret_borrow<py::object>(object), serial});
  release_kept();
  return serial;
}

// In torch 2.11, and in 2.15 no more, the end of one of CUDA's leaves weak references to it as they
// are, and whoever frees such a reference reads freed memory (pytorch/pytorch#183403).
bool is_stream_or_event(PyObject* object) {
  const auto& [stream, event] = made_once([] {
    const auto torch = py::module_::import("torch");
    return std::pair<py::object, py::object>(torch.attr("Stream"), torch.attr("Event"));
  });
  const auto is_a = [object](const py::object& type) {
    return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type.ptr()));
  };
  return is_a(stream) || is_a(event);
}

}  // namespace

uint64_t serial_of(PyObject* object) {
  const auto found = known_objects.find(object);
  if (found != known_objects.end()) {
    const Known& known = found->second;
    const bool is_same = known.reference ? !is_gone(known) : known.type == Py_TYPE(object);
    if (is_same) return known.serial;
    known_objects.erase(found);
  }
  if (is_stream_or_event(object)) return serial_of_kept(object);
  auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(object, nullptr));
  if (!reference) {
    PyErr_Clear();
    if (!PyObject_IS_GC(object)) return serial_of_kept(object);
  }
  sweep();
  const uint64_t serial = ++last_serial;
  known_objects.emplace(object, Known{std::move(reference), Py_TYPE(object), serial});
  return serial;
}

}  // namespace megagraph
