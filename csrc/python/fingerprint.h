// SPDX-License-Identifier: Apache-2.0
// Hashes of what a capture depends on and that may change between steps.
//
// Note [Module fingerprint]
// Parameters may move, be replaced or frozen, submodules come and go, hooks be registered. To look
// for each of these in Python is a walk over everything, before every step. The hash is one call,
// and as long as it stays, nobody needs to look more closely. It covers, for
// each module: which submodules and parameters it has, the keys of its hooks, the addresses of its
// buffers; for each parameter: address, requires_grad, hooks of the tensor and of its gradient
// accumulator, main_grad and that one's address. Memory that was freed counts as no address.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace megagraph {

// Of where the tensors lie, and of which of them require a gradient.
std::pair<size_t, size_t> fingerprint(const std::vector<at::Tensor>& tensors);

// Note [Module fingerprint]. `modules` are weak references; one that is dead counts as such.
size_t module_fingerprint(const pybind11::list& modules);

// Of the modules' `training` flags, in order; the same in every process. `modules` are weak
// references; one that is dead counts as one that does not train.
size_t training_modes(const pybind11::list& modules);

}  // namespace megagraph
