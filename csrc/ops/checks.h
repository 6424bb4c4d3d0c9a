// SPDX-License-Identifier: Apache-2.0
// Input checks that several ops share.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>

#include "csrc/ops/rope_rotation.h"

namespace megagraph {

// What Python hands over as None, of which autograd would say that it has no device.
inline void check_given(const at::Tensor& tensor, const char* name, const char* op) {
  TORCH_CHECK_VALUE(tensor.defined(), op, ": ", name, " must be a tensor, got None");
}

inline void check_cu_seqlens(const at::Tensor& cu_seqlens, const char* op) {
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.sym_size(0) >= 1, op,
                    ": cu_seqlens must be 1-D with at least one entry, got shape ",
                    cu_seqlens.sym_sizes());
  TORCH_CHECK_VALUE(cu_seqlens.scalar_type() == at::kInt, op, ": cu_seqlens must be int32, got ",
                    cu_seqlens.scalar_type());
  TORCH_CHECK_VALUE(cu_seqlens.is_contiguous(), op, ": cu_seqlens must be contiguous");
}

// For the CPU, where reading the offsets costs nothing.
inline void check_offset_values(const at::Tensor& cu_seqlens, int64_t tokens, int64_t multiple,
                                const char* op) {
  const int32_t* cu = cu_seqlens.const_data_ptr<int32_t>();
  const int64_t num_seqs = cu_seqlens.numel() - 1;
  TORCH_CHECK_VALUE(cu[0] == 0, op, ": the first offset must be 0, got ", cu[0]);
  for (int64_t i = 0; i < num_seqs; ++i) {
    const int64_t length = int64_t{cu[i + 1]} - cu[i];
    TORCH_CHECK_VALUE(length >= 0, op, ": document ", i, " has length ", length,
                      "; offsets must not decrease");
    TORCH_CHECK_VALUE(length % multiple == 0, op, ": document ", i, " has length ", length,
                      ", not a multiple of 2 * cp_size = ", multiple);
  }
  TORCH_CHECK_VALUE(cu[num_seqs] <= tokens, op, ": the last offset ", cu[num_seqs], " is past the ",
                    tokens, " physical tokens");
}

// What context parallelism asks of every document's length.
inline int64_t length_multiple(int64_t cp_size) { return cp_size == 1 ? 1 : 2 * cp_size; }

inline void check_same_device(const at::Tensor& a, const at::Tensor& b, const char* op) {
  TORCH_CHECK_VALUE(a.device() == b.device(), op, ": all tensors must be on one device, got ",
                    a.device(), " and ", b.device());
}

inline void check_context_parallel(int64_t cp_size, int64_t cp_rank, const char* op) {
  TORCH_CHECK_VALUE(cp_size >= 1 && 0 <= cp_rank && cp_rank < cp_size, op,
                    ": need 0 <= cp_rank < cp_size, got cp_rank ", cp_rank, " and cp_size ",
                    cp_size);
  TORCH_CHECK_VALUE(cp_size <= std::numeric_limits<int32_t>::max() / 2, op, ": cp_size ", cp_size,
                    " does not fit int32 with its pieces");
}

inline RopeScalar rope_scalar_of(at::ScalarType type, const char* op) {
  switch (type) {
    case at::kHalf:
      return RopeScalar::kHalf;
    case at::kBFloat16:
      return RopeScalar::kBFloat16;
    case at::kFloat:
      return RopeScalar::kFloat;
    case at::kDouble:
      return RopeScalar::kDouble;
    default:
      TORCH_CHECK_VALUE(false, op, ": expected a floating dtype, got ", type);
  }
}

}  // namespace megagraph
