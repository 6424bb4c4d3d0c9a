// SPDX-License-Identifier: Apache-2.0
// What torch keeps for each thread: whether graphs are off on it, and what somebody has told torch
// to do with every op, or with every tensor that autograd saves. A replay makes no ops and saves
// nothing.
//
// No release from 2.11 to 2.15 differs.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/disable_torch_function.h>

#include <memory>
#include <string>
#include <string_view>

namespace megagraph {

// Such as torch.utils.checkpoint(use_reentrant=False) and save_on_cpu() have.
inline bool has_saved_tensor_hooks() {
  return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

inline bool has_dispatch_modes() { return c10::impl::dispatch_mode_enabled(); }

// Of those that are told of calls of torch's functions. A default device is one, and changes none.
// Needs the GIL.
inline bool has_function_modes() {
  using Modes = at::impl::PythonTorchFunctionTLS;
  for (int64_t i = 0; i < Modes::stack_len(); ++i) {
    const PyObject* mode = Modes::get_stack_at(i)->ptr(getPyInterpreter());
    if (std::string_view(Py_TYPE(mode)->tp_name) != "DeviceContext") return true;
  }
  return false;
}

// While it lives, ops of this thread reach no dispatch of Python's.
using NoDispatchModes = torch::DisableTorchDispatch;

// Whether autocast keeps its casts of leaves for later calls. Returns what was so before.
inline bool set_keeps_casts(bool is_now) {
  const bool before = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_cache_enabled(is_now);
  return before;
}

// Whether graphs are off, on autograd's threads too while they run backward passes of this one.
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
