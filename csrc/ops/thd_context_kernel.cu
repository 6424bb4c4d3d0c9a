// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDAException.h>

#include "csrc/ops/kernels.h"
#include "csrc/ops/thd_context.h"

namespace megagraph {
namespace {

constexpr int kThreads = 256;

unsigned blocks_of(int64_t rows) { return static_cast<unsigned>((rows + kThreads - 1) / kThreads); }

__global__ void gathered_rows_kernel(const int32_t* __restrict__ cu, int32_t num_seqs,
                                     int32_t* __restrict__ out, int32_t total_tokens,
                                     int32_t cp_size) {
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= total_tokens) return;
  const auto it = static_cast<int32_t>(row);
  out[row] = gathered_row(cu, num_seqs, it, total_tokens, cp_size);
  out[total_tokens + row] = physical_row_of_gathered(cu, num_seqs, it, total_tokens, cp_size);
}

// There are more keys than gathered rows. Offsets may be more than either, of a pack of empty
// slots.
__global__ void context_keys_kernel(ContextKeys maps) {
  const int64_t at = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const auto it = static_cast<int32_t>(at);
  const int32_t* cu = maps.cu_seqlens;
  if (at <= 2 * int64_t{maps.num_seqs}) {
    const ContextOffsets found = context_offsets(cu, it, maps.cp_size, maps.cp_rank);
    maps.queries[at] = found.queries;
    maps.seen[at] = found.keys;
  }
  if (at < maps.num_keys) {
    maps.keys[at] =
        gathered_row_of_key(cu, maps.num_seqs, it, maps.total_tokens, maps.cp_size, maps.cp_rank);
  }
  if (at < maps.total_tokens) {
    const KeyPlaces found = places_of_gathered_row(cu, maps.num_seqs, it, maps.total_tokens,
                                                   maps.cp_size, maps.cp_rank, maps.num_keys);
    maps.places[at] = found.first;
    maps.places[maps.total_tokens + at] = found.second;
  }
}

}  // namespace

void gathered_rows(const int32_t* cu_seqlens, int32_t num_seqs, int32_t* out, int32_t total_tokens,
                   int32_t cp_size, cudaStream_t stream) {
  if (total_tokens == 0) return;
  gathered_rows_kernel<<<blocks_of(total_tokens), kThreads, 0, stream>>>(cu_seqlens, num_seqs, out,
                                                                         total_tokens, cp_size);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void context_keys(const ContextKeys& maps, cudaStream_t stream) {
  const int64_t offsets = 2 * int64_t{maps.num_seqs} + 1;
  const int64_t most = maps.num_keys > offsets ? maps.num_keys : offsets;
  context_keys_kernel<<<blocks_of(most), kThreads, 0, stream>>>(maps);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace megagraph
