// SPDX-License-Identifier: Apache-2.0
// Errors between Python and C++ as torch carries them.
//
// No release differs. HANDLE_TH_ERRORS and END_HANDLE_TH_ERRORS enclose a function that CPython
// calls, and turn what it throws into the Python error that torch's own functions would raise.
#pragma once

#include <torch/csrc/Exceptions.h>

namespace megagraph {

// Throws the Python error that is set, so that it crosses autograd's threads. Needs the GIL.
[[noreturn]] inline void throw_python_error() {
  python_error raised;
  raised.persist();
  throw raised;
}

}  // namespace megagraph
