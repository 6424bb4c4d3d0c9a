// SPDX-License-Identifier: Apache-2.0
// Queries and keys with values in one launch, 16-byte accesses if the layout allows, 64-bit
// offsets. A position past the tables stops the kernel with a device assertion.
//
// Note [A warp to a part]
// Memory is busy only while much of it is asked for at once. So a token's work is cut into parts of
// about 2 KiB, each for a warp that loads it whole before it needs anything else, stores it and
// ends: no warp waits for another, and a part takes so few registers that a multiprocessor holds
// dozens. Only rotated parts look for their token's position, behind their loads; what is copied
// needs to know no more than where the tail begins. The parts of a token lie side by side in the
// grid, so that its rows are read together and its tables come from the first-level cache.

#include <c10/cuda/CUDAException.h>
#include <c10/macros/Macros.h>
#include <cuda_pipeline.h>

#include <algorithm>
#include <type_traits>

#include "csrc/ops/kernels.h"
#include "csrc/ops/rope_pairs.cuh"
#include "csrc/ops/thd_positions.h"

namespace megagraph {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 8;       // of a block
constexpr int kWords = 4;          // that a lane copies at once
constexpr int kPairs = 4;          // chunks of pairs that a lane rotates at once
constexpr int kMaxRotary = 256;    // dimensions, as rope_mla_tensors.h has it
constexpr int kTileBytes = 16384;  // of the rotary gradients that a block adds up at once
constexpr int32_t kUnknown = -2;
// In place, a warp holds whole heads, so that it alone reads and writes them.
static_assert(kPairs * kWarp >= kMaxRotary / 2);

// Pairs to a chunk: 16 bytes, side by side.
template <int kVec>
constexpr int kChunk = kVec == 1 ? 1 : kVec / 2;

// How warps lie over the chunks of a token's heads.
struct Tiling {
  int chunks, lanes;  // of a head, and how many of them are side by side in a warp
  int columns;        // of warps, to cover a head
  int heads;          // of a warp, at a time
};

// A token's parts by kind, in the order of the grid. Either a block holds whole tokens, or a token
// has whole blocks.
struct Parts {
  int keys, queries, query_copies, copies;
  int token_blocks;
  Tiling rotary, of_query, of_kv;

  C10_HOST_DEVICE int all() const { return keys + queries + query_copies + copies; }
};

// One row for each head of a token. The one rotary key is every head's.
template <typename scalar_t>
struct Rows {
  scalar_t* data;
  int64_t stride;

  __device__ Rows(const RopeMlaView& view, int32_t token, int d = 0)
      : data(static_cast<scalar_t*>(view.data) + token * view.token_stride + d),
        stride(view.heads == 1 ? 0 : view.head_stride) {}
  __device__ scalar_t* at(int head, int d = 0) const { return data + head * stride + d; }
};

__device__ int lane() { return threadIdx.x; }

// A lane's chunk, and the first of the heads of its warp; those that make no whole head are left
// out.
struct Place {
  int chunk, head;

  __device__ Place(int lanes, int heads) : head(lane() / static_cast<unsigned>(lanes)) {
    chunk = lane() - head * lanes;
    if (head >= heads) head = 1 << 30;
  }
};

__device__ bool is_tail(const RopeMlaArgs& args, int32_t token) {
  return (token + int64_t{1}) * args.cp_size > args.cu_seqlens[args.num_seqs];
}

// -1 in the tail.
__device__ int32_t position_of(const RopeMlaArgs& args, int32_t token) {
  const int32_t position =
      args.cp_size == 1  // spares divisions
          ? document_position(args.cu_seqlens, args.num_seqs, token, 1, 0)
          : document_position(args.cu_seqlens, args.num_seqs, token, args.cp_size, args.cp_rank);
  CUDA_KERNEL_ASSERT(position < args.positions);
  return position;
}

// Copies a part of all heads' chunks; in the tail, zeros. `from` and `to` tell where a chunk lies.
template <typename scalar_t, int kVec, typename From, typename To>
__device__ void copy_part(const RopeMlaArgs& args, int32_t token, int part, int heads,
                          const Tiling& tiling, From from, To to) {
  using word_t = Word<kVec * sizeof(scalar_t)>;
  const Place place(tiling.lanes, tiling.heads);
  const int row = part / tiling.columns, column = part - row * tiling.columns;
  const int chunk = column * tiling.lanes + place.chunk;
  if (chunk >= tiling.chunks) return;
  const int first = row * tiling.heads * kWords + place.head;
  const Rows<scalar_t> in = from(chunk * kVec), out = to(chunk * kVec);
  const scalar_t* in_at = in.at(first);
  scalar_t* out_at = out.at(first);
  word_t x[kWords];
#pragma unroll
  for (int k = 0; k < kWords; ++k, in_at += in.stride * tiling.heads) {
    if (first + k * tiling.heads < heads) x[k] = *reinterpret_cast<const word_t*>(in_at);
  }
  if (is_tail(args, token)) {
#pragma unroll
    for (word_t& word : x) word = {};
  }
#pragma unroll
  for (int k = 0; k < kWords; ++k, out_at += out.stride * tiling.heads) {
    if (first + k * tiling.heads < heads) store_word(out_at, x[k]);
  }
}

// A chunk of pairs and its place in a rotary part of 2 * half elements. A whole warp reads and
// writes adjacent pairs in one access each, or it would write half sectors.
template <typename scalar_t, int kVec>
struct Chunk {
  using P = Pairs<scalar_t, kChunk<kVec>>;

  static __device__ P load(const scalar_t* rotary, int chunk, int half, bool split) {
    P x;
    if (split || kVec == 1) {
      x.load(rotary, chunk, half, split);
      return x;
    }
    const auto run = load_whole<Vec<scalar_t, 2 * kChunk<kVec>>>(rotary + chunk * kVec);
    memcpy(&x, &run, sizeof(x));
    return x;
  }
  static __device__ void store(scalar_t* rotary, int chunk, int half, bool split, const P& x) {
    if (split || kVec == 1) return x.store(rotary, chunk, half, split);
    Vec<scalar_t, 2 * kChunk<kVec>> run;
    memcpy(&run, &x, sizeof(x));
    store_whole(rotary + chunk * kVec, run);
  }
};

// cos and sin of one chunk of pairs.
template <typename scalar_t, int kVec>
struct Tables {
  Pairs<scalar_t, kChunk<kVec>> cos{}, sin{};

  __device__ void load(const RopeMlaArgs& args, int32_t position, int chunk) {
    const int64_t row = int64_t{position} * args.rotary_dim;
    const int half = args.rotary_dim / 2;
    cos.load(static_cast<const scalar_t*>(args.cos) + row, chunk, half, true);
    sin.load(static_cast<const scalar_t*>(args.sin) + row, chunk, half, true);
  }
};

// From adjacent members to split ones, or back.
template <bool backward, typename P, typename T>
__device__ P rotated(const P& x, const T& tables) {
  constexpr RopeRounding kHow = RopeRounding::kFused;
  const P y = rotate<kHow, backward>(backward ? x : x.unzipped(), tables.cos, tables.sin);
  return backward ? y.zipped() : y;
}

// Rotates a part of the heads. In place, what is not rotated stays as it is, but for the tail.
template <typename scalar_t, int kVec, bool backward>
__device__ void rotate_part(const RopeMlaArgs& args, int32_t token, int part, const Tiling& tiling,
                            const RopeMlaView& in, const RopeMlaView& out) {
  using C = Chunk<scalar_t, kVec>;
  const int half = args.rotary_dim / 2, content = out.dim - args.rotary_dim;
  const Rows<scalar_t> from(in, token, in.dim - args.rotary_dim), to(out, token, content);
  // A lane takes its chunk of several heads, or several of one that has more than a warp has lanes.
  const bool one = tiling.columns > 1;
  const int step = one ? 0 : tiling.heads, chunk_step = one ? kWarp : 0;
  const int whole = one ? 1 : kPairs * tiling.heads;
  const int first = part * whole, heads = min(whole, out.heads - first);
  const Place place(tiling.lanes, tiling.heads);
  const auto is_mine = [&](int k) {
    return place.head + k * step < heads && place.chunk + k * chunk_step < tiling.chunks;
  };
  typename C::P x[kPairs];
  const scalar_t* in_at = from.at(first + place.head);
#pragma unroll
  for (int k = 0; k < kPairs; ++k, in_at += step * from.stride) {
    if (is_mine(k)) x[k] = C::load(in_at, place.chunk + k * chunk_step, half, backward);
  }
  const int32_t position = position_of(args, token);
  Tables<scalar_t, kVec> tables;
  if (position >= 0) tables.load(args, position, place.chunk);
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    if (k > 0 && one && position >= 0 && is_mine(k)) {
      tables.load(args, position, place.chunk + k * chunk_step);
    }
    x[k] = rotated<backward>(x[k], tables);
    if (position < 0) x[k] = {};
  }
  __syncwarp();  // in place, a chunk's pairs go where other lanes found theirs
  scalar_t* out_at = to.at(first + place.head);
#pragma unroll
  for (int k = 0; k < kPairs; ++k, out_at += step * to.stride) {
    if (is_mine(k)) C::store(out_at, place.chunk + k * chunk_step, half, !backward, x[k]);
  }
  if constexpr (!backward) {
    if (in.data != out.data || position >= 0) return;
#pragma unroll 1
    for (int i = 0; i < heads; ++i) {
      for (int d = lane() * kVec; d < content; d += kWarp * kVec) {
        store_whole(to.at(first + i, d - content), Vec<scalar_t, kVec>{});
      }
    }
  }
}

// The gradient of the rotary key: the sum over all heads, in float and in their order, rotated
// back. A lane adds up dimensions of its own, out of a tile that is filled without registers, so
// that as many heads are on their way at once as it holds.
template <typename scalar_t, int kVec>
__device__ void sum_keys(const RopeMlaArgs& args, int32_t token) {
  using sum_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
  using C = Chunk<scalar_t, kVec>;
  using V = Vec<scalar_t, kVec>;
  constexpr int kSums = kVec == 1 ? 1 : 2;  // side by side
  constexpr int kDims = kSums * kWarp;      // of a tile
  __shared__ alignas(16) unsigned char tiles[kTileBytes];
  __shared__ alignas(16) scalar_t sums[kMaxWarps][kMaxRotary];
  const int tile_heads = kTileBytes / (blockDim.z * kDims * static_cast<int>(sizeof(scalar_t)));
  scalar_t* tile = reinterpret_cast<scalar_t*>(tiles) + threadIdx.z * tile_heads * kDims;
  scalar_t* row = sums[threadIdx.z];
  const Rows<scalar_t> k(args.k, token, args.k.dim - args.rotary_dim);
  const auto fill = [&](int first, int heads, int d, int dims) {
    const int chunks = dims / kVec, step = kWarp / chunks;
    const Place place(chunks, step);
    const scalar_t* from = k.at(first + place.head, d + place.chunk * kVec);
    scalar_t* to = tile + place.head * kDims + place.chunk * kVec;
#pragma unroll 4
    for (int head = place.head; head < heads; head += step) {
      if constexpr (sizeof(V) == 16) {
        __pipeline_memcpy_async(to, from, sizeof(V));
      } else {
        *to = *from;
      }
      from += step * k.stride;
      to += step * kDims;
    }
    __pipeline_commit();
  };
  int32_t position = kUnknown;
  for (int d = 0; d < args.rotary_dim; d += kDims) {
    const int dims = min(kDims, args.rotary_dim - d), mine = lane() * kSums;
    sum_t sum[kSums]{};
    for (int first = 0; first < args.k.heads; first += tile_heads) {
      const int heads = min(tile_heads, args.k.heads - first);
      fill(first, heads, d, dims);
      if (position == kUnknown) position = position_of(args, token);
      __pipeline_wait_prior(0);
      __syncwarp();
      if (mine < dims) {
#pragma unroll 16
        for (int head = 0; head < heads; ++head) {
          const auto x = *reinterpret_cast<const Vec<scalar_t, kSums>*>(tile + head * kDims + mine);
#pragma unroll
          for (int i = 0; i < kSums; ++i) sum[i] += static_cast<sum_t>(x.at[i]);
        }
      }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (mine < dims) row[d + mine + i] = static_cast<scalar_t>(sum[i]);
    }
  }
  __syncwarp();
  const int half = args.rotary_dim / 2;
  const Rows<scalar_t> k_pe(args.k_pe, token);
  for (int chunk = lane(); chunk < half / kChunk<kVec>; chunk += kWarp) {
    typename C::P y{};
    if (position >= 0) {
      Tables<scalar_t, kVec> tables;
      tables.load(args, position, chunk);
      y = rotated<true>(C::load(row, chunk, half, true), tables);
    }
    C::store(k_pe.data, chunk, half, false, y);
  }
}

template <typename scalar_t, int kVec, bool backward>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 4)
    rope_mla_kernel(const __grid_constant__ RopeMlaArgs args, const __grid_constant__ Parts parts) {
  const int group = blockIdx.x / parts.token_blocks;
  const int32_t token = group * blockDim.z + threadIdx.z;
  int part = (blockIdx.x - group * parts.token_blocks) * blockDim.y + threadIdx.y;
  if (token >= args.tokens) return;
  if (part < parts.keys) {
    if constexpr (backward) return sum_keys<scalar_t, kVec>(args, token);
    return rotate_part<scalar_t, kVec, false>(args, token, part, parts.rotary, args.k_pe, args.k);
  }
  part -= parts.keys;
  if (part < parts.queries) {
    return rotate_part<scalar_t, kVec, backward>(args, token, part, parts.rotary, args.q,
                                                 args.q_out);
  }
  part -= parts.queries;
  if (part < parts.query_copies) {
    const auto in = [&](int d) { return Rows<scalar_t>(args.q, token, d); };
    const auto out = [&](int d) { return Rows<scalar_t>(args.q_out, token, d); };
    return copy_part<scalar_t, kVec>(args, token, part, args.q.heads, parts.of_query, in, out);
  }
  part -= parts.query_copies;
  if (part >= parts.copies) return;  // a token's last block may have warps to spare
  const int content = args.k.dim - args.rotary_dim;
  const auto joint = [&](int d) { return Rows<scalar_t>(args.kv, token, d); };
  const auto apart = [&](int d) {
    return d < content ? Rows<scalar_t>(args.k, token, d)
                       : Rows<scalar_t>(args.v, token, d - content);
  };
  if constexpr (backward) {
    copy_part<scalar_t, kVec>(args, token, part, args.kv.heads, parts.of_kv, apart, joint);
  } else {
    copy_part<scalar_t, kVec>(args, token, part, args.kv.heads, parts.of_kv, joint, apart);
  }
}

// Whether every access of the kernel may be 16 bytes wide.
bool allows_wide_access(const RopeMlaArgs& args, int64_t element) {
  const auto fits = [&](int64_t elements) { return elements * element % 16 == 0; };
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  bool wide = aligned(args.cos) && aligned(args.sin) && fits(args.rotary_dim / 2);
  for (const RopeMlaView& view : {args.q, args.q_out, args.kv, args.k_pe, args.k, args.v}) {
    wide = wide && aligned(view.data) && fits(view.token_stride) && fits(view.head_stride) &&
           fits(view.dim);
  }
  return wide;
}

int groups_of(int size, int64_t count) { return static_cast<int>((count + size - 1) / size); }

Tiling tiling_of(int chunks) {
  if (chunks == 0) return {};
  const int columns = groups_of(kWarp, chunks), lanes = groups_of(columns, chunks);
  return {chunks, lanes, columns, kWarp / lanes};
}

template <int kVec>
Parts parts_of(const RopeMlaArgs& args, bool backward) {
  const auto copied = [](const Tiling& tiling, int heads) {
    return tiling.chunks == 0 ? 0 : groups_of(tiling.heads * kWords, heads) * tiling.columns;
  };
  const int chunks = args.rotary_dim / 2 / kChunk<kVec>;
  Parts parts{};
  parts.rotary = {chunks, std::min(chunks, kWarp), groups_of(kWarp, chunks),
                  std::max(kWarp / chunks, 1)};
  const int whole = parts.rotary.columns > 1 ? 1 : kPairs * parts.rotary.heads;
  if (args.k_pe.data != nullptr) parts.keys = backward ? 1 : groups_of(whole, args.k.heads);
  if (args.q.data != nullptr) {
    parts.queries = groups_of(whole, args.q.heads);
    if (backward) parts.of_query = tiling_of((args.q.dim - args.rotary_dim) / kVec);
  }
  parts.of_kv = tiling_of(args.kv.dim / kVec);
  parts.query_copies = copied(parts.of_query, args.q.heads);
  parts.copies = copied(parts.of_kv, args.kv.heads);
  parts.token_blocks = std::max(groups_of(kMaxWarps, parts.all()), 1);
  return parts;
}

template <typename scalar_t>
void launch(const RopeMlaArgs& args, bool backward, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(scalar_t);
  const auto with = [&](auto vec) {
    constexpr int kVec = decltype(vec)::value;
    const Parts parts = parts_of<kVec>(args, backward);
    if (parts.all() == 0) return;
    const int tokens = std::max(kMaxWarps / parts.all(), 1);  // of a block
    const dim3 block(kWarp, groups_of(parts.token_blocks, parts.all()), tokens);
    const unsigned groups = groups_of(tokens, args.tokens);
    const auto run = [&](auto kernel) {
      kernel<<<groups * parts.token_blocks, block, 0, stream>>>(args, parts);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    return backward ? run(rope_mla_kernel<scalar_t, kVec, true>)
                    : run(rope_mla_kernel<scalar_t, kVec, false>);
  };
  return allows_wide_access(args, sizeof(scalar_t)) ? with(std::integral_constant<int, kWide>{})
                                                    : with(std::integral_constant<int, 1>{});
}

}  // namespace

void rope_mla(const RopeMlaArgs& args, RopeScalar scalar, bool backward, cudaStream_t stream) {
  if (args.tokens == 0) return;
  switch (scalar) {
    case RopeScalar::kHalf:
      return launch<c10::Half>(args, backward, stream);
    case RopeScalar::kBFloat16:
      return launch<c10::BFloat16>(args, backward, stream);
    case RopeScalar::kFloat:
      return launch<float>(args, backward, stream);
    case RopeScalar::kDouble:
      return launch<double>(args, backward, stream);
  }
}

}  // namespace megagraph
