// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDAException.h>

#include "csrc/ops/kernels.h"
#include "csrc/ops/thd_positions.h"

namespace megagraph {
namespace {

constexpr int kThreads = 256;

__global__ void partition_rows_kernel(const int32_t* __restrict__ cu, int32_t num_seqs,
                                      int32_t* __restrict__ out, int32_t rows, int32_t total_tokens,
                                      int32_t cp_size, int32_t cp_rank) {
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= rows) return;
  out[row] = physical_row(cu, num_seqs, static_cast<int32_t>(row), total_tokens, cp_size, cp_rank);
}

}  // namespace

void partition_rows(const int32_t* cu_seqlens, int32_t num_seqs, int32_t* out, int32_t rows,
                    int32_t total_tokens, int32_t cp_size, int32_t cp_rank, cudaStream_t stream) {
  if (rows == 0) return;
  const auto blocks = static_cast<unsigned>((int64_t{rows} + kThreads - 1) / kThreads);
  partition_rows_kernel<<<blocks, kThreads, 0, stream>>>(cu_seqlens, num_seqs, out, rows,
                                                         total_tokens, cp_size, cp_rank);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace megagraph
