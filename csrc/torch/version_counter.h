// SPDX-License-Identifier: Apache-2.0
// What autograd is told of a write in place that it did not see.
//
// No release differs.
#pragma once

#include <torch/csrc/autograd/variable.h>

namespace megagraph {

// Saved versions of `t` are stale from here on.
inline void note_write(const at::Tensor& t) { torch::autograd::impl::bump_version(t); }

}  // namespace megagraph
