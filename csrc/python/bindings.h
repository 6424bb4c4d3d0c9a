// SPDX-License-Identifier: Apache-2.0
// What the files of the cold Python face share. Bindings only forward; megagraph/_C.pyi is their
// manual.
#pragma once

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <vector>

#include "csrc/bank/executable.h"

namespace megagraph {

// An Executable on its way from its capture to its site.
struct ExecutableHandle {
  std::unique_ptr<Executable> executable;
};

// An undefined tensor in C++ is None in Python.
inline std::vector<std::optional<at::Tensor>> or_none(const std::vector<at::Tensor>& tensors) {
  std::vector<std::optional<at::Tensor>> result;
  for (const at::Tensor& t : tensors) {
    result.push_back(t.defined() ? std::make_optional(t) : std::nullopt);
  }
  return result;
}

void bind_capture(pybind11::module_& m);
void bind_dispatch(pybind11::module_& m);
void bind_packs(pybind11::module_& m);
void bind_replay(pybind11::module_& m);
void bind_verify(pybind11::module_& m);
void bind_watch(pybind11::module_& m);

}  // namespace megagraph
