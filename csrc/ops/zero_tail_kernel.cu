// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "csrc/ops/kernels.h"

namespace megagraph {
namespace {

constexpr int kThreads = 256;
// Tails are short as a rule: a few blocks suffice, and the kernel costs little if there is none.
constexpr unsigned kTailBlocks = 128;
constexpr int64_t kMaxCopyBlocks = 1 << 16;

// Word is the widest type that divides every address and size.
template <typename Word>
__global__ void zero_tails_kernel(const __grid_constant__ Tails tails,
                                  const int32_t* __restrict__ end) {
  const int t = blockIdx.y;
  const int64_t row_words = tails.row_bytes[t] / sizeof(Word);
  const int64_t total = tails.rows[t] * row_words;
  Word* data = static_cast<Word*>(tails.data[t]);
  for (int64_t i = max(*end, 0) * row_words + blockIdx.x * int64_t{kThreads} + threadIdx.x;
       i < total; i += int64_t{gridDim.x} * kThreads) {
    data[i] = Word{};
  }
}

template <typename Word>
__global__ void copy_rows_zero_tail_kernel(const Word* __restrict__ in, int64_t in_rows,
                                           Word* __restrict__ out, int64_t out_rows,
                                           int64_t row_words, const int32_t* __restrict__ end) {
  const int64_t valid = min(min(int64_t{max(*end, 0)}, in_rows), out_rows) * row_words;
  const int64_t total = out_rows * row_words;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < total;
       i += int64_t{gridDim.x} * kThreads) {
    out[i] = i < valid ? in[i] : Word{};
  }
}

bool divides_16(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && bytes % 16 == 0;
}

}  // namespace

void zero_tails(const Tails& tails, const int32_t* end, cudaStream_t stream) {
  if (tails.count == 0) return;
  bool wide = true;
  for (int t = 0; t < tails.count; ++t) wide &= divides_16(tails.data[t], tails.row_bytes[t]);
  const dim3 grid(kTailBlocks, tails.count);
  if (wide) {
    zero_tails_kernel<uint4><<<grid, kThreads, 0, stream>>>(tails, end);
  } else {
    zero_tails_kernel<uint8_t><<<grid, kThreads, 0, stream>>>(tails, end);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void copy_rows_zero_tail(const void* in, int64_t in_rows, void* out, int64_t out_rows,
                         int64_t row_bytes, const int32_t* end, cudaStream_t stream) {
  const auto launch = [&](auto word) {
    using Word = decltype(word);
    const int64_t row_words = row_bytes / static_cast<int64_t>(sizeof(Word));
    const auto blocks = static_cast<unsigned>(
        std::min((out_rows * row_words + kThreads - 1) / kThreads, kMaxCopyBlocks));
    if (blocks == 0) return;
    copy_rows_zero_tail_kernel<Word><<<blocks, kThreads, 0, stream>>>(
        static_cast<const Word*>(in), in_rows, static_cast<Word*>(out), out_rows, row_words, end);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  if (divides_16(in, row_bytes) && divides_16(out, 0)) {
    launch(uint4{});
  } else {
    launch(uint8_t{});
  }
}

}  // namespace megagraph
