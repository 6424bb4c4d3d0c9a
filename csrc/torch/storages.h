// SPDX-License-Identifier: Apache-2.0
// Storages: over memory that has its own owner, given up by a tensor that lives on for its history,
// or with numbers that calls read.
//
// No release differs. at::from_blob() cannot make a storage that resizes as Megatron expects it.
// Autograd saves a tensor itself, or another one over its storage: both counts of owners tell.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <optional>

namespace megagraph {

// A detached tensor over `data`, of the dtype and shape of `like`, which must be contiguous; of its
// first `rows` rows only, if given. The storage is the tensor's own and resizable.
at::Tensor alias_like(const at::Tensor& like, c10::DataPtr data, std::optional<int64_t> rows);

// Whether a call may read its entries as numbers: few of them on the host, one after another.
inline bool may_be_numbers(const at::Tensor& tensor) {
  constexpr int64_t kFew = 8;
  return tensor.is_cpu() && tensor.has_storage() && tensor.numel() <= kFew &&
         tensor.is_contiguous();
}

// Frees the memory of `made` once the current stream is done, as `resize_(0)` of its storage would,
// unless somebody can read it: expected are the caller's reference to `made` and another one, and
// `taken`, which is detached from it. Their shapes stay. Returns whether it did.
bool free_if_unread(const at::Tensor& made, const at::Tensor& taken);

}  // namespace megagraph
