// SPDX-License-Identifier: Apache-2.0
// All tensors of a call in one launch, 16-byte accesses if the layout allows, 64-bit offsets. A
// position past the tables stops the kernel with a device assertion.
// Most calls run rope_thd_lanes.cuh; what it does not take runs the kernel below: partly rotated
// heads, heads that are not a power of two, DeepSeek's layout, other dtypes, unaligned views.

#include <c10/cuda/CUDAException.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <type_traits>

#include "csrc/ops/kernels.h"
#include "csrc/ops/rope_pairs.cuh"
#include "csrc/ops/rope_thd_lanes.cuh"
#include "csrc/ops/thd_positions.h"

namespace megagraph {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kHeads = 4;

// One head of one token, in and out.
template <typename scalar_t>
struct Head {
  const scalar_t* in;
  scalar_t* out;
  int32_t dim;

  __device__ Head(const RopeArgs& args, int32_t row, int head) {
    int n = 0;
    while (head >= args.first_head[n + 1]) ++n;
    const int local = head - args.first_head[n];
    const int heads = args.first_head[n + 1] - args.first_head[n];
    in = static_cast<const scalar_t*>(args.in[n]) + row * args.in_token_stride[n] +
         local * args.in_head_stride[n];
    out = static_cast<scalar_t*>(args.out[n]) + (int64_t{row} * heads + local) * args.dim[n];
    dim = args.dim[n];
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
  constexpr int32_t kUnknown = -2;
  using P = Pairs<scalar_t, kVec>;

  const int32_t row = blockIdx.x;
  const int half = args.rotary_dim / 2;
  const int chunks = half / kVec;
  const int total_heads = args.first_head[args.num_tensors];
  const auto look_up = [&] {
    const int32_t found =
        document_position(args.cu_seqlens, args.num_seqs, row, args.cp_size, args.cp_rank);
    CUDA_KERNEL_ASSERT(found < args.positions);
    return found;
  };
  int32_t position = kUnknown;

  for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    P cos, sin;
    bool has_tables = false;
    for (int first = threadIdx.y; first < total_heads; first += kHeads * blockDim.y) {
      P x[kHeads];
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        const int head = first + k * blockDim.y;
        if (head < total_heads) {
          x[k].load(Head<scalar_t>(args, row, head).in, chunk, half, kInSplit);
        }
      }
      if (position == kUnknown) position = look_up();
      if (position >= 0 && !has_tables) {
        const int64_t table = int64_t{position} * args.rotary_dim;
        cos.load(static_cast<const scalar_t*>(args.cos) + table, chunk, half, kRotatedSplit);
        sin.load(static_cast<const scalar_t*>(args.sin) + table, chunk, half, kRotatedSplit);
        if constexpr (!kRotatedSplit) {
          cos = cos.unzipped();
          sin = sin.unzipped();
        }
        has_tables = true;
      }
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        const int head = first + k * blockDim.y;
        if (head >= total_heads) break;
        P y{};
        if (position >= 0) {
          y = rotate<RopeRounding::kEach, backward>(kInSplit ? x[k] : x[k].unzipped(), cos, sin);
          if constexpr (!kOutSplit) y = y.zipped();
        }
        y.store(Head<scalar_t>(args, row, head).out, chunk, half, kOutSplit);
      }
    }
  }

  // Dimensions past the rotary part.
  for (int first = threadIdx.y; first < total_heads; first += blockDim.y) {
    const Head<scalar_t> head(args, row, first);
    for (int d = args.rotary_dim + threadIdx.x; d < head.dim; d += blockDim.x) {
      if (position == kUnknown) position = look_up();
      head.out[d] = position >= 0 ? head.in[d] : scalar_t(0);
    }
  }
}

template <typename scalar_t, int kVec, bool backward>
void launch(const RopeArgs& args, RopeLayout layout, cudaStream_t stream) {
  const int total_heads = args.first_head[args.num_tensors];
  const int chunks = std::clamp(args.rotary_dim / 2 / kVec, 1, 64);
  const int groups = (total_heads + kHeads - 1) / kHeads;
  const dim3 block(chunks, std::clamp(kMaxThreads / chunks, 1, groups));
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
    if constexpr (!std::is_void_v<Packed<scalar_t>>) {
      if (fits_lanes(args, layout)) {
        return backward ? launch_lanes<scalar_t, true>(args, layout, stream)
                        : launch_lanes<scalar_t, false>(args, layout, stream);
      }
    }
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
