// SPDX-License-Identifier: Apache-2.0
// Memory of tensors that live on for their history alone.
//
// No release differs: autograd saves a tensor itself, or another one over its storage, so that both
// counts of owners together tell.
#pragma once

#include <ATen/core/Tensor.h>

namespace megagraph {

// Frees the memory of `made` once the current stream is done, as `resize_(0)` of its storage would,
// unless somebody can read it: expected are the caller's reference to `made` and another one, and
// `taken`, which is detached from it. Their shapes stay. Returns whether it did.
bool free_if_unread(const at::Tensor& made, const at::Tensor& taken);

}  // namespace megagraph
