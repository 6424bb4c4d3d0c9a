// SPDX-License-Identifier: Apache-2.0
// The rotation of 16-bit heads whose every dimension is rotated, 16 bytes of a head to a lane.
// Takes most models' heads; rope_thd_kernel.cu has a kernel for all others.
//
// Note [RoPE at memory speed]
// Rounded to 16 bits one by one, as c10's types do it, the products and sums of a pair cost more
// time than its bytes. So two elements are computed at once by the packed instructions, which round
// each product and sum once, as Note [RoPE bits] asks. A warp reads and writes whole runs of
// memory: the members of a NeoX pair lie in two lanes, which swap them; those of an interleaved
// pair lie in one register. A lane loads its part of kLaneHeads heads before it looks for the
// token's position, so that the search hides behind the loads.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/macros/Macros.h>

#include <algorithm>

#include "csrc/ops/kernels.h"
#include "csrc/ops/rope_pairs.cuh"
#include "csrc/ops/thd_positions.h"

namespace megagraph {

constexpr int kLaneHeads = 5;
constexpr int kMaxLaneGroups = 32;  // of heads, in a block

// 16 bytes of a head.
template <typename packed_t>
struct alignas(16) Lane {
  packed_t at[4];
};

template <typename packed_t>
__device__ unsigned bits_of(packed_t x) {
  return reinterpret_cast<const unsigned&>(x);
}
template <typename packed_t>
__device__ packed_t from_bits(unsigned bits) {
  return reinterpret_cast<const packed_t&>(bits);
}

// The other member of each pair: in the lane half a head away, or in the register's other half.
template <bool kNeox, typename packed_t>
__device__ packed_t other_members(packed_t x, int lanes, unsigned together) {
  if constexpr (kNeox) return from_bits<packed_t>(__shfl_xor_sync(together, bits_of(x), lanes / 2));
  return from_bits<packed_t>(__byte_perm(bits_of(x), 0, 0x1032));
}

// Note [RoPE bits] for every element, first or second of its pair. The other member's product is
// negated in first members, whose sign bits `flip` has; backward it is negated in second members.
// `together`: the lanes of this head.
template <bool kNeox, bool backward, typename packed_t>
__device__ packed_t rotate_members(packed_t x, packed_t cos, packed_t sin, unsigned flip, int lanes,
                                   unsigned together) {
  const packed_t straight = __hmul2_rn(x, cos);
  if constexpr (backward) {
    const packed_t crossed = other_members<kNeox>(__hmul2_rn(x, sin), lanes, together);
    return __hadd2_rn(straight, from_bits<packed_t>(bits_of(crossed) ^ (~flip & 0x80008000u)));
  } else {
    const packed_t crossed =
        from_bits<packed_t>(bits_of(other_members<kNeox>(x, lanes, together)) ^ flip);
    return __hadd2_rn(straight, __hmul2_rn(crossed, sin));
  }
}

// A block holds one token: threadIdx.x is the lane of a head, threadIdx.y a group of heads.
template <typename scalar_t, bool kNeox, bool backward>
__global__ void rope_thd_lanes_kernel(const __grid_constant__ RopeArgs args) {
  using packed_t = Packed<scalar_t>;
  using L = Lane<packed_t>;
  const int32_t row = blockIdx.x;
  const int lane = threadIdx.x, lanes = blockDim.x;
  const int total_heads = args.first_head[args.num_tensors];

  const int heads_at_once = kLaneHeads * blockDim.y;
  const unsigned flip = !kNeox ? 0x00008000u : lane < lanes / 2 ? 0x80008000u : 0u;
  const int in_warp = (threadIdx.y * lanes + lane) % warpSize;
  const unsigned together = (~0u >> (warpSize - lanes)) << (in_warp - lane);
  const auto tensor_of = [&](int head) {
    int n = 0;
    while (head >= args.first_head[n + 1]) ++n;
    return n;
  };

  for (int first = threadIdx.y; first - threadIdx.y < total_heads; first += heads_at_once) {
    L x[kLaneHeads]{};
#pragma unroll
    for (int k = 0; k < kLaneHeads; ++k) {
      const int head = first + k * blockDim.y;
      if (head >= total_heads) continue;
      const int n = tensor_of(head);
      const auto* in = static_cast<const scalar_t*>(args.in[n]) + row * args.in_token_stride[n] +
                       (head - args.first_head[n]) * args.in_head_stride[n];
      x[k] = reinterpret_cast<const L*>(in)[lane];
    }
    const int32_t position =
        args.cp_size == 1
            ? document_position(args.cu_seqlens, args.num_seqs, row, 1, 0)  // spares divisions
            : document_position(args.cu_seqlens, args.num_seqs, row, args.cp_size, args.cp_rank);
    CUDA_KERNEL_ASSERT(position < args.positions);
    L cos{}, sin{};
    if (position >= 0) {
      const int64_t table = int64_t{position} * args.rotary_dim;
      cos = reinterpret_cast<const L*>(static_cast<const scalar_t*>(args.cos) + table)[lane];
      sin = reinterpret_cast<const L*>(static_cast<const scalar_t*>(args.sin) + table)[lane];
    }
#pragma unroll
    for (int k = 0; k < kLaneHeads; ++k) {
#pragma unroll
      for (packed_t& members : x[k].at) {
        const auto i = &members - x[k].at;
        members =
            rotate_members<kNeox, backward>(members, cos.at[i], sin.at[i], flip, lanes, together);
      }
      const int head = first + k * blockDim.y;
      if (head >= total_heads) continue;
      const int n = tensor_of(head);
      const int heads = args.first_head[n + 1] - args.first_head[n];
      auto* out = static_cast<scalar_t*>(args.out[n]) +
                  (int64_t{row} * heads + head - args.first_head[n]) * args.dim[n];
      reinterpret_cast<L*>(out)[lane] = position >= 0 ? x[k] : L{};
    }
  }
}

// Whether rope_thd_lanes_kernel can run a call whose accesses may be 16 bytes wide.
inline bool fits_lanes(const RopeArgs& args, RopeLayout layout) {
  const int lanes = args.rotary_dim / 8;
  bool fits = layout != RopeLayout::kMla && lanes >= 2 && lanes <= 32 && (lanes & (lanes - 1)) == 0;
  for (int n = 0; n < args.num_tensors; ++n) fits = fits && args.dim[n] == args.rotary_dim;
  return fits;
}

template <typename scalar_t, bool backward>
void launch_lanes(const RopeArgs& args, RopeLayout layout, cudaStream_t stream) {
  const int groups = (args.first_head[args.num_tensors] + kLaneHeads - 1) / kLaneHeads;
  const dim3 block(args.rotary_dim / 8, std::min(groups, kMaxLaneGroups));
  const auto rows = static_cast<unsigned>(args.tokens);
  if (layout == RopeLayout::kNeox) {
    rope_thd_lanes_kernel<scalar_t, true, backward><<<rows, block, 0, stream>>>(args);
  } else {
    rope_thd_lanes_kernel<scalar_t, false, backward><<<rows, block, 0, stream>>>(args);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace megagraph
