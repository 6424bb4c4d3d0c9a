// SPDX-License-Identifier: Apache-2.0
// Hooks on a parameter's gradient accumulator, which a site would bypass.
//
// No release differs. Hooks that were registered from Python lie together in one hook's dictionary,
// whose type is known by name only: libtorch_python does not export it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megagraph {

// DDP's own hook counts as one; hooks on the tensor itself are not counted. Needs the GIL.
int64_t count_accumulator_hooks(const at::Tensor& param);

}  // namespace megagraph
