// SPDX-License-Identifier: Apache-2.0
// The values that calls are given, wherever they lie in containers and plain objects.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <vector>

namespace megagraph {

// Every tensor among the arguments of a call, which are a mapping by name.
std::vector<at::Tensor> tensors_in(const pybind11::object& arguments);

// Where the first argument is that was computed from the content of a buffer; none if each lies in
// a buffer or is the same in `others`, made while the buffers held something else.
std::optional<std::string> computed_argument(const pybind11::object& arguments,
                                             const pybind11::object& others,
                                             const std::vector<at::Tensor>& buffers);

}  // namespace megagraph
