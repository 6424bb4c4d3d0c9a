// SPDX-License-Identifier: Apache-2.0
// Tensors over memory that has its own owner.
//
// No release differs. at::from_blob() cannot make a storage that resizes as Megatron expects it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <optional>

namespace megagraph {

// A detached tensor over `data`, of the dtype and shape of `like`, which must be contiguous; of its
// first `rows` rows only, if given. The storage is the tensor's own and resizable.
at::Tensor alias_like(const at::Tensor& like, c10::DataPtr data, std::optional<int64_t> rows);

}  // namespace megagraph
