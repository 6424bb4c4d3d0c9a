// SPDX-License-Identifier: Apache-2.0
// Which physical rows a context-parallel rank holds: each document is cut in 2 * cp_size chunks,
// and rank r takes chunks r and 2 * cp_size - 1 - r (zigzag, balances causal attention). The tail
// is dealt out in contiguous pieces, so over all ranks every physical row appears exactly once.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

#include "csrc/ops/checks.h"
#include "csrc/ops/thd_positions.h"
#ifdef MEGAGRAPH_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "csrc/ops/kernels.h"
#endif

namespace megagraph {
namespace {

at::Tensor thd_partition_indices_meta(const at::Tensor& cu_seqlens_padded, c10::SymInt total_tokens,
                                      int64_t cp_size, int64_t cp_rank) {
  check_cu_seqlens(cu_seqlens_padded, "thd_partition_indices");
  check_context_parallel(cp_size, cp_rank, "thd_partition_indices");
  TORCH_CHECK_VALUE(total_tokens % cp_size == 0, "thd_partition_indices: total_tokens ",
                    total_tokens, " is not a multiple of cp_size ", cp_size);
  TORCH_CHECK_VALUE(total_tokens >= 0 && total_tokens <= std::numeric_limits<int32_t>::max(),
                    "thd_partition_indices: total_tokens ", total_tokens, " does not fit int32");
  return at::empty_symint({total_tokens / cp_size}, cu_seqlens_padded.options());
}

at::Tensor thd_partition_indices_cpu(const at::Tensor& cu_seqlens_padded, int64_t total_tokens,
                                     int64_t cp_size, int64_t cp_rank) {
  at::Tensor out = thd_partition_indices_meta(cu_seqlens_padded, total_tokens, cp_size, cp_rank);
  check_offset_values(cu_seqlens_padded, total_tokens, length_multiple(cp_size),
                      "thd_partition_indices");
  const int32_t* cu = cu_seqlens_padded.const_data_ptr<int32_t>();
  const int32_t num_seqs = static_cast<int32_t>(cu_seqlens_padded.numel()) - 1;
  int32_t* data = out.mutable_data_ptr<int32_t>();
  for (int64_t row = 0; row < out.numel(); ++row) {
    data[row] =
        physical_row(cu, num_seqs, static_cast<int32_t>(row), static_cast<int32_t>(total_tokens),
                     static_cast<int32_t>(cp_size), static_cast<int32_t>(cp_rank));
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CPU, m) {
  m.impl("thd_partition_indices", thd_partition_indices_cpu);
}
TORCH_LIBRARY_IMPL(megagraph, Meta, m) {
  m.impl("thd_partition_indices", thd_partition_indices_meta);
}

#ifdef MEGAGRAPH_WITH_CUDA
namespace {

// Offsets stay on the device, so their values are not checked here: a document whose length is no
// multiple of 2 * cp_size gives undefined rows.
at::Tensor thd_partition_indices_cuda(const at::Tensor& cu_seqlens_padded, int64_t total_tokens,
                                      int64_t cp_size, int64_t cp_rank) {
  const c10::cuda::CUDAGuard guard(cu_seqlens_padded.device());
  at::Tensor out = thd_partition_indices_meta(cu_seqlens_padded, total_tokens, cp_size, cp_rank);
  partition_rows(cu_seqlens_padded.const_data_ptr<int32_t>(),
                 static_cast<int32_t>(cu_seqlens_padded.numel()) - 1,
                 out.mutable_data_ptr<int32_t>(), static_cast<int32_t>(out.numel()),
                 static_cast<int32_t>(total_tokens), static_cast<int32_t>(cp_size),
                 static_cast<int32_t>(cp_rank), c10::cuda::getCurrentCUDAStream());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CUDA, m) {
  m.impl("thd_partition_indices", thd_partition_indices_cuda);
}
#endif

}  // namespace megagraph
