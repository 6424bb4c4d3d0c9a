// SPDX-License-Identifier: Apache-2.0
// All tensors of a call in one launch, 16-byte accesses where the layout allows, 64-bit offsets. A
// position past the tables stops the kernel with a device assertion.

#include <c10/cuda/CUDAException.h>
#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "csrc/ops/kernels.h"
#include "csrc/ops/thd_positions.h"

namespace megagraph {
namespace {

constexpr int kMaxThreads = 512;

template <typename scalar_t, int kVec>
struct alignas(sizeof(scalar_t) * kVec) Vec {
  scalar_t at[kVec];
};

// The two vectors of a chunk: kVec pairs, whose members lie either in two runs that are half a
// rotary part apart (split) or side by side in one run (adjacent).
template <typename scalar_t, int kVec>
struct Chunk {
  Vec<scalar_t, kVec> low, high;

  __device__ void load(const scalar_t* base, int chunk, int half, bool split) {
    using V = Vec<scalar_t, kVec>;
    const int step = split ? half : kVec;
    const scalar_t* at = base + (split ? chunk * kVec : 2 * chunk * kVec);
    low = *reinterpret_cast<const V*>(at);
    high = *reinterpret_cast<const V*>(at + step);
  }
  __device__ void store(scalar_t* base, int chunk, int half, bool split) const {
    using V = Vec<scalar_t, kVec>;
    const int step = split ? half : kVec;
    scalar_t* at = base + (split ? chunk * kVec : 2 * chunk * kVec);
    *reinterpret_cast<V*>(at) = low;
    *reinterpret_cast<V*>(at + step) = high;
  }
  __device__ RopePair<scalar_t> pair(int i, bool split) const {
    if (split) return {low.at[i], high.at[i]};
    const int j = 2 * i;
    if (kVec == 1) return {low.at[0], high.at[0]};
    return j < kVec ? RopePair<scalar_t>{low.at[j], low.at[j + 1]}
                    : RopePair<scalar_t>{high.at[j - kVec], high.at[j - kVec + 1]};
  }
  __device__ void set_pair(int i, bool split, RopePair<scalar_t> p) {
    const int j = 2 * i;
    if (split || kVec == 1) {
      low.at[i] = p.first;
      high.at[i] = p.second;
    } else if (j < kVec) {
      low.at[j] = p.first;
      low.at[j + 1] = p.second;
    } else {
      high.at[j - kVec] = p.first;
      high.at[j - kVec + 1] = p.second;
    }
  }
};

// A block holds one token; threadIdx.x walks the chunks of a head and threadIdx.y the heads, so a
// thread keeps its cos and sin in registers for all heads.
template <typename scalar_t, int kVec, RopeLayout layout, bool backward>
__global__ void rope_thd_kernel(const __grid_constant__ RopeArgs args) {
  constexpr bool kRotatedSplit = layout != RopeLayout::kInterleaved;
  constexpr bool kSourceSplit = layout == RopeLayout::kNeox;
  constexpr bool kInSplit = backward ? kRotatedSplit : kSourceSplit;
  constexpr bool kOutSplit = backward ? kSourceSplit : kRotatedSplit;
  using C = Chunk<scalar_t, kVec>;

  const int32_t row = blockIdx.x;
  const int32_t position =
      document_position(args.cu_seqlens, args.num_seqs, row, args.cp_size, args.cp_rank);
  CUDA_KERNEL_ASSERT(position < args.positions);
  const int half = args.rotary_dim / 2;
  const int chunks = half / kVec;
  const int total_heads = args.first_head[args.num_tensors];

  for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    C cos, sin;
    if (position >= 0) {
      const int64_t table = int64_t{position} * args.rotary_dim;
      cos.load(static_cast<const scalar_t*>(args.cos) + table, chunk, half, kRotatedSplit);
      sin.load(static_cast<const scalar_t*>(args.sin) + table, chunk, half, kRotatedSplit);
    }
    int n = 0;
    for (int head = threadIdx.y; head < total_heads; head += blockDim.y) {
      while (head >= args.first_head[n + 1]) ++n;
      const int local_head = head - args.first_head[n];
      const int heads = args.first_head[n + 1] - args.first_head[n];
      scalar_t* out =
          static_cast<scalar_t*>(args.out[n]) + (int64_t{row} * heads + local_head) * args.dim[n];
      C y{};
      if (position >= 0) {
        C x;
        x.load(static_cast<const scalar_t*>(args.in[n]) + row * args.in_token_stride[n] +
                   local_head * args.in_head_stride[n],
               chunk, half, kInSplit);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const auto p = x.pair(i, kInSplit);
          const auto c = cos.pair(i, kRotatedSplit);
          const auto s = sin.pair(i, kRotatedSplit);
          y.set_pair(i, kOutSplit, backward ? rotate_pair_back(p, c, s) : rotate_pair(p, c, s));
        }
      }
      y.store(out, chunk, half, kOutSplit);
    }
  }

  // Dimensions past the rotary part.
  for (int head = threadIdx.y; head < total_heads; head += blockDim.y) {
    int n = 0;
    while (head >= args.first_head[n + 1]) ++n;
    const int local_head = head - args.first_head[n];
    const int heads = args.first_head[n + 1] - args.first_head[n];
    const scalar_t* in = static_cast<const scalar_t*>(args.in[n]) + row * args.in_token_stride[n] +
                         local_head * args.in_head_stride[n];
    scalar_t* out =
        static_cast<scalar_t*>(args.out[n]) + (int64_t{row} * heads + local_head) * args.dim[n];
    for (int d = args.rotary_dim + threadIdx.x; d < args.dim[n]; d += blockDim.x) {
      out[d] = position >= 0 ? in[d] : scalar_t(0);
    }
  }
}

template <typename scalar_t, int kVec, bool backward>
void launch(const RopeArgs& args, RopeLayout layout, cudaStream_t stream) {
  const int total_heads = args.first_head[args.num_tensors];
  const int chunks = std::clamp(args.rotary_dim / 2 / kVec, 1, 64);
  const dim3 block(chunks, std::clamp(kMaxThreads / chunks, 1, total_heads));
  const auto run = [&](auto kernel) {
    kernel<<<static_cast<unsigned>(args.tokens), block, 0, stream>>>(args);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  switch (layout) {
    case RopeLayout::kNeox:
      return run(rope_thd_kernel<scalar_t, kVec, RopeLayout::kNeox, backward>);
    case RopeLayout::kInterleaved:
      return run(rope_thd_kernel<scalar_t, kVec, RopeLayout::kInterleaved, backward>);
    case RopeLayout::kMla:
      return run(rope_thd_kernel<scalar_t, kVec, RopeLayout::kMla, backward>);
  }
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Whether every access of the kernel may be 16 bytes wide.
bool allows_wide_access(const RopeArgs& args, int64_t element) {
  bool wide = aligned(args.cos) && aligned(args.sin) && args.rotary_dim / 2 * element % 16 == 0;
  for (int n = 0; n < args.num_tensors; ++n) {
    wide = wide && aligned(args.in[n]) && aligned(args.out[n]) &&
           args.in_token_stride[n] * element % 16 == 0 &&
           args.in_head_stride[n] * element % 16 == 0 && args.dim[n] * element % 16 == 0;
  }
  return wide;
}

template <typename scalar_t>
void launch_typed(const RopeArgs& args, RopeLayout layout, bool backward, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(scalar_t);
  if (allows_wide_access(args, sizeof(scalar_t))) {
    return backward ? launch<scalar_t, kWide, true>(args, layout, stream)
                    : launch<scalar_t, kWide, false>(args, layout, stream);
  }
  return backward ? launch<scalar_t, 1, true>(args, layout, stream)
                  : launch<scalar_t, 1, false>(args, layout, stream);
}

}  // namespace

void rope_thd(const RopeArgs& args, RopeScalar scalar, RopeLayout layout, bool backward,
              cudaStream_t stream) {
  if (args.tokens == 0 || args.first_head[args.num_tensors] == 0) return;
  switch (scalar) {
    case RopeScalar::kHalf:
      return launch_typed<c10::Half>(args, layout, backward, stream);
    case RopeScalar::kBFloat16:
      return launch_typed<c10::BFloat16>(args, layout, backward, stream);
    case RopeScalar::kFloat:
      return launch_typed<float>(args, layout, backward, stream);
    case RopeScalar::kDouble:
      return launch_typed<double>(args, layout, backward, stream);
  }
}

}  // namespace megagraph
