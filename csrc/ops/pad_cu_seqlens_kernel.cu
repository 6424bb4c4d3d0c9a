// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDAException.h>

#include "csrc/ops/kernels.h"

namespace megagraph {
namespace {

constexpr int kThreads = 256;

__global__ void pad_offsets_kernel(const int32_t* __restrict__ in, int64_t given,
                                   int32_t* __restrict__ out, int64_t total, bool has_end,
                                   int32_t end) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= total) return;
  out[i] = i < given ? in[i] : (has_end ? end : in[given - 1]);
}

}  // namespace

void pad_offsets(const int32_t* in, int64_t given, int32_t* out, int64_t total, const int32_t* end,
                 cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((total + kThreads - 1) / kThreads);
  pad_offsets_kernel<<<blocks, kThreads, 0, stream>>>(in, given, out, total, end != nullptr,
                                                      end != nullptr ? *end : 0);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace megagraph
