// SPDX-License-Identifier: Apache-2.0
// Whether graphs are off on this thread, and on autograd's while they run its backward passes,
// which is where torch keeps such objects for.
//
// No release from 2.11 to 2.15 differs.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/python_headers.h>

#include <memory>
#include <string>

namespace megagraph {

inline bool is_skipped() {
  using Objects = at::impl::ThreadLocalPythonObjects;
  static const std::string& key = *new std::string("megagraph");
  return Objects::contains(key) && Objects::get(key)->ptr(getPyInterpreter()) == Py_True;
}

// Returns what was so before.
inline bool set_skipped(bool is_now) {
  const bool before = is_skipped();
  PyObject* flag = is_now ? Py_True : Py_False;
  Py_INCREF(flag);
  at::impl::ThreadLocalPythonObjects::set(
      "megagraph", std::make_shared<c10::SafePyObject>(flag, getPyInterpreter()));
  return before;
}

}  // namespace megagraph
