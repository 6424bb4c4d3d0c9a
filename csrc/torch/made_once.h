// SPDX-License-Identifier: Apache-2.0
// What Python is asked for once in a process.
#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include <type_traits>

namespace megagraph {

// What `make` returns, made once for each place that says so, and never given back. Imports in it
// may hand the GIL to a thread that comes here, too, and would wait at the guard of a plain static
// while the first one waits for the GIL.
template <typename Make>
const std::invoke_result_t<Make>& made_once(const Make& make) {
  PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<std::invoke_result_t<Make>> made;
  return made.call_once_and_store_result(make).get_stored();
}

}  // namespace megagraph
