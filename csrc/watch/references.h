// SPDX-License-Identifier: Apache-2.0
// Short ways through Python's C interface.
#pragma once

#include <pybind11/pybind11.h>

namespace megagraph {

// Python finds an interned name in a dictionary by its address. Never given back: these are asked
// for in every step, the last one included.
inline const pybind11::str& interned(const char* name) {
  return *new pybind11::str(
      pybind11::reinterpret_steal<pybind11::str>(PyUnicode_InternFromString(name)));
}

// What a weak reference refers to; null where that is gone.
inline pybind11::object referent(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(found);
#else
  PyObject* found = PyWeakref_GetObject(reference);
  if (found == nullptr) throw pybind11::error_already_set();
  return found == Py_None ? pybind11::object()
                          : pybind11::reinterpret_borrow<pybind11::object>(found);
#endif
}

// Borrowed; null where a dictionary has no such entry.
inline PyObject* entry(PyObject* dict, const pybind11::str& name) {
  PyObject* found = PyDict_GetItemWithError(dict, name.ptr());
  if (found == nullptr && PyErr_Occurred()) throw pybind11::error_already_set();
  return found;
}

// The dictionary of an object's attributes.
inline pybind11::object attributes_of(PyObject* object) {
  auto attributes =
      pybind11::reinterpret_steal<pybind11::object>(PyObject_GenericGetDict(object, nullptr));
  if (!attributes) throw pybind11::error_already_set();
  return attributes;
}

// The modules that are registered with one, by name. Borrowed; null where it has none of its own.
inline PyObject* registered(PyObject* module) {
  static const pybind11::str& modules = interned("_modules");
  const auto attributes =
      pybind11::reinterpret_steal<pybind11::object>(PyObject_GenericGetDict(module, nullptr));
  if (!attributes) PyErr_Clear();  // it has no attributes of its own
  PyObject* const table = attributes ? entry(attributes.ptr(), modules) : nullptr;
  return table != nullptr && PyDict_Check(table) ? table : nullptr;
}

// The one of a name. Borrowed; null for none.
inline PyObject* registered(PyObject* module, const pybind11::str& name) {
  PyObject* const table = registered(module);
  return table == nullptr ? nullptr : entry(table, name);
}

// Whether a module's attribute is another than what is registered: of its own, or of its class.
inline bool hides_registered(PyObject* module, const pybind11::str& name) {
  return entry(attributes_of(module).ptr(), name) != nullptr ||
         _PyType_Lookup(Py_TYPE(module), name.ptr()) != nullptr;
}

// Whether an object has this dictionary of attributes: it may be given another one, of which
// neither dictionary tells. Asked of every module and parameter in each call, so that no reference
// is made.
inline bool is_dict_of(PyObject* object, const PyObject* dict) {
  PyObject** const attributes = _PyObject_GetDictPtr(object);
  return attributes != nullptr && *attributes == dict;
}

// The same of what a weak reference refers to, which may be gone.
inline bool has_attributes(PyObject* reference, const PyObject* dict) {
  const pybind11::object object = referent(reference);
  return object && is_dict_of(object.ptr(), dict);
}

}  // namespace megagraph
