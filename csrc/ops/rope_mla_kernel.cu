// SPDX-License-Identifier: Apache-2.0
// Queries and keys with values in one launch, 16-byte accesses if the layout allows, 64-bit
// offsets. A position past the tables stops the kernel with a device assertion.
//
// Two blocks hold one token: the first of them its keys and values, the other its queries. All
// threads of a block load before they look for the token's position, so that the search hides
// behind the loads.

#include <c10/cuda/CUDAException.h>
#include <c10/macros/Macros.h>

#include <type_traits>

#include "csrc/ops/kernels.h"
#include "csrc/ops/rope_pairs.cuh"
#include "csrc/ops/thd_positions.h"

namespace megagraph {
namespace {

constexpr int kFewThreads = 128, kThreads = 256;  // at least one for each rotary dimension
constexpr int kHeads = 4;                         // that a thread holds at once
constexpr int kSharedBytes = 16384;

template <typename scalar_t>
__device__ scalar_t* at(const RopeMlaView& view, int32_t row, int head) {
  return static_cast<scalar_t*>(view.data) + row * view.token_stride + head * view.head_stride;
}

// A thread's chunk, and which heads it takes it of.
struct Share {
  int chunk, chunks, head, heads;  // begin and step of each

  // No more than `chunks` threads to a head; those that make no whole head are left out.
  __device__ Share(int chunks, int total_heads) {
    const int threads = blockDim.x;
    const int wide = max(min(chunks, threads), 1);
    this->chunks = wide;
    heads = threads / wide;
    chunk = threadIdx.x % wide;
    head = threadIdx.x / wide;
    if (head >= heads) head = total_heads;
  }
};

// The position of a block's token, looked up when it is first asked for.
class Token {
 public:
  __device__ explicit Token(const RopeMlaArgs& args) : args_(args) {}
  __device__ int32_t position() {
    if (position_ == kUnknown) {
      position_ = args_.cp_size == 1  // spares divisions
                      ? document_position(args_.cu_seqlens, args_.num_seqs, blockIdx.x, 1, 0)
                      : document_position(args_.cu_seqlens, args_.num_seqs, blockIdx.x,
                                          args_.cp_size, args_.cp_rank);
      CUDA_KERNEL_ASSERT(position_ < args_.positions);
    }
    return position_;
  }
  __device__ bool is_tail() { return position() < 0; }

 private:
  static constexpr int32_t kUnknown = -2;
  const RopeMlaArgs& args_;
  int32_t position_ = kUnknown;
};

// Copies chunks [0, chunks) of every head; in the tail, zeros. `from` and `to` tell where a chunk
// of a head lies.
template <typename scalar_t, int kVec, typename From, typename To>
__device__ void copy_heads(Token& token, int chunks, int total_heads, From from, To to) {
  using word_t = Word<kVec * sizeof(scalar_t)>;
  const Share share(chunks, total_heads);
  for (int chunk = share.chunk; chunk < chunks; chunk += share.chunks) {
    for (int first = share.head; first < total_heads; first += kHeads * share.heads) {
      word_t x[kHeads];
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        const int head = first + k * share.heads;
        if (head < total_heads) {
          x[k] = *reinterpret_cast<const word_t*>(from(head, chunk * kVec));
        }
      }
      const bool is_tail = token.is_tail();
#pragma unroll
      for (int k = 0; k < kHeads; ++k) {
        const int head = first + k * share.heads;
        if (head < total_heads) store_word(to(head, chunk * kVec), is_tail ? word_t{} : x[k]);
      }
    }
  }
}

// cos and sin of one chunk of pairs; not of the tail.
template <typename scalar_t, int kVec>
struct Tables {
  Pairs<scalar_t, kVec> cos{}, sin{};

  __device__ Tables(const RopeMlaArgs& args, Token& token, int chunk) {
    if (token.is_tail()) return;
    const int64_t row = int64_t{token.position()} * args.rotary_dim;
    const int half = args.rotary_dim / 2;
    cos.load(static_cast<const scalar_t*>(args.cos) + row, chunk, half, true);
    sin.load(static_cast<const scalar_t*>(args.sin) + row, chunk, half, true);
  }
};

// From adjacent members to split ones, or back.
template <RopeRounding rounding, bool backward, typename scalar_t, int kVec>
__device__ Pairs<scalar_t, kVec> rotated(const Pairs<scalar_t, kVec>& x,
                                         const Tables<scalar_t, kVec>& tables) {
  const auto y = rotate<rounding, backward>(backward ? x : x.unzipped(), tables.cos, tables.sin);
  return backward ? y.zipped() : y;
}

template <typename scalar_t, int kVec, RopeRounding rounding, bool backward>
__device__ void rotate_queries(const RopeMlaArgs& args, Token& token) {
  using P = Pairs<scalar_t, kVec>;
  const int32_t row = blockIdx.x;
  const int half = args.rotary_dim / 2, chunks = half / kVec;
  const int content = args.q.dim - args.rotary_dim;
  const Share share(chunks, args.q.heads);
  for (int base = 0; base < args.q.heads; base += kHeads * share.heads) {
    P x[kHeads];
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      const int head = base + share.head + k * share.heads;
      if (head >= args.q.heads) continue;
      x[k].load(at<scalar_t>(args.q, row, head) + content, share.chunk, half, backward);
    }
    const Tables<scalar_t, kVec> tables(args, token, share.chunk);
    __syncthreads();  // in place, a chunk's pairs go where other threads found theirs
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      const int head = base + share.head + k * share.heads;
      if (head >= args.q.heads) continue;
      P y{};
      if (!token.is_tail()) y = rotated<rounding, backward>(x[k], tables);
      y.store(at<scalar_t>(args.q_out, row, head) + content, share.chunk, half, !backward);
    }
  }
  // In place, what is not rotated stays as it is, but for the tail.
  if (backward || token.is_tail()) {
    copy_heads<scalar_t, kVec>(
        token, content / kVec, args.q.heads,
        [&](int head, int d) { return at<scalar_t>(args.q, row, head) + d; },
        [&](int head, int d) { return at<scalar_t>(args.q_out, row, head) + d; });
  }
}

// The gradients of the rotary key: their sum over all heads, in float and in the order of the
// heads, rotated back. The first of them are loaded when it is made.
template <typename scalar_t, int kVec>
class RotaryGradients {
 public:
  using V = Vec<scalar_t, kVec>;
  using sum_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

  __device__ explicit RotaryGradients(const RopeMlaArgs& args)
      : args_(args), content_(args.k.dim - args.rotary_dim), chunks_(args.rotary_dim / kVec) {
    if (threadIdx.x < args.k.heads * chunks_) first_ = load(0, threadIdx.x);
  }

  template <RopeRounding rounding>
  __device__ void rotate_back(Token& token) {
    __shared__ alignas(16) unsigned char shared[kSharedBytes];
    auto* tile = reinterpret_cast<scalar_t*>(shared);
    const int rotary_dim = args_.rotary_dim;
    const int tile_heads = kSharedBytes / static_cast<int>(sizeof(scalar_t)) / rotary_dim;
    const int d = threadIdx.x, threads = blockDim.x;
    sum_t sum = 0;
    for (int base = 0; base < args_.k.heads; base += tile_heads) {
      const int heads = min(tile_heads, args_.k.heads - base);
      for (int i = threadIdx.x; i < heads * chunks_; i += threads) {
        const bool is_here = base == 0 && i < threads;
        *reinterpret_cast<V*>(tile + i * kVec) = is_here ? first_ : load(base, i);
      }
      __syncthreads();
      if (d < rotary_dim) {
#pragma unroll 8
        for (int head = 0; head < heads; ++head) {
          sum += static_cast<sum_t>(tile[head * rotary_dim + d]);
        }
      }
      __syncthreads();
    }
    if (d < rotary_dim) tile[d] = static_cast<scalar_t>(sum);
    __syncthreads();
    const int half = rotary_dim / 2;
    for (int chunk = threadIdx.x; chunk < half / kVec; chunk += threads) {
      Pairs<scalar_t, kVec> y{};
      if (!token.is_tail()) {
        y.load(tile, chunk, half, true);
        y = rotated<rounding, true>(y, Tables<scalar_t, kVec>(args_, token, chunk));
      }
      y.store(at<scalar_t>(args_.k_pe, blockIdx.x, 0), chunk, half, false);
    }
  }

 private:
  // Chunk i of those of all heads from `base` on.
  __device__ V load(int base, int i) const {
    const int head = i / chunks_, d = (i - head * chunks_) * kVec;
    return load_whole<V>(at<scalar_t>(args_.k, blockIdx.x, base + head) + content_ + d);
  }

  const RopeMlaArgs& args_;
  const int content_, chunks_;
  V first_;
};

// A chunk of the rotary key, loaded when it is made, for some of the heads.
template <typename scalar_t, int kVec>
class RotaryKey {
 public:
  __device__ explicit RotaryKey(const RopeMlaArgs& args)
      : args_(args), half_(args.rotary_dim / 2), share_(half_ / kVec, args.k.heads) {
    x_.load(at<scalar_t>(args.k_pe, blockIdx.x, 0), share_.chunk, half_, false);
  }

  template <RopeRounding rounding>
  __device__ void rotate(Token& token) {
    Pairs<scalar_t, kVec> y{};
    if (!token.is_tail()) {
      y = rotated<rounding, false>(x_, Tables<scalar_t, kVec>(args_, token, share_.chunk));
    }
    const int content = args_.k.dim - args_.rotary_dim;
    for (int head = share_.head; head < args_.k.heads; head += share_.heads) {
      y.store(at<scalar_t>(args_.k, blockIdx.x, head) + content, share_.chunk, half_, true);
    }
  }

 private:
  const RopeMlaArgs& args_;
  const int half_;
  const Share share_;
  Pairs<scalar_t, kVec> x_;
};

template <typename scalar_t, int kVec, RopeRounding rounding, bool backward>
__global__ void __launch_bounds__(kThreads)
    rope_mla_kernel(const __grid_constant__ RopeMlaArgs args) {
  Token token(args);
  if (args.k_pe.data == nullptr || blockIdx.y == 1) {
    return rotate_queries<scalar_t, kVec, rounding, backward>(args, token);
  }
  const int32_t row = blockIdx.x;
  const int content = args.k.dim - args.rotary_dim;
  const auto joint = [&](int head, int d) { return at<scalar_t>(args.kv, row, head) + d; };
  const auto apart = [&](int head, int d) {
    return d < content ? at<scalar_t>(args.k, row, head) + d
                       : at<scalar_t>(args.v, row, head) + (d - content);
  };
  const int chunks = args.kv.dim / kVec;
  if constexpr (backward) {
    RotaryGradients<scalar_t, kVec> gradients(args);
    copy_heads<scalar_t, kVec>(token, chunks, args.kv.heads, apart, joint);
    gradients.template rotate_back<rounding>(token);
  } else {
    RotaryKey<scalar_t, kVec> key(args);
    copy_heads<scalar_t, kVec>(token, chunks, args.kv.heads, joint, apart);
    key.template rotate<rounding>(token);
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

template <typename scalar_t>
void launch(const RopeMlaArgs& args, RopeRounding rounding, bool backward, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(scalar_t);
  const bool has_both = args.q.data != nullptr && args.k_pe.data != nullptr;
  const dim3 grid(static_cast<unsigned>(args.tokens), has_both ? 2 : 1);
  // With few heads, so many threads that each has something to load.
  const RopeMlaView& most = args.k_pe.data != nullptr ? args.kv : args.q;
  const int64_t row_bytes = int64_t{most.heads} * most.dim * sizeof(scalar_t);
  const bool few = row_bytes <= kFewThreads * kHeads * 16 && args.rotary_dim <= kFewThreads;
  const auto run = [&](auto kernel) {
    kernel<<<grid, few ? kFewThreads : kThreads, 0, stream>>>(args);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  const auto with = [&](auto vec, auto how) {
    constexpr int kVec = decltype(vec)::value;
    constexpr RopeRounding kHow = decltype(how)::value;
    return backward ? run(rope_mla_kernel<scalar_t, kVec, kHow, true>)
                    : run(rope_mla_kernel<scalar_t, kVec, kHow, false>);
  };
  const auto rounded = [&](auto vec) {
    return rounding == RopeRounding::kFused
               ? with(vec, std::integral_constant<RopeRounding, RopeRounding::kFused>{})
               : with(vec, std::integral_constant<RopeRounding, RopeRounding::kEach>{});
  };
  return allows_wide_access(args, sizeof(scalar_t)) ? rounded(std::integral_constant<int, kWide>{})
                                                    : rounded(std::integral_constant<int, 1>{});
}

}  // namespace

void rope_mla(const RopeMlaArgs& args, RopeScalar scalar, RopeRounding rounding, bool backward,
              cudaStream_t stream) {
  if (args.tokens == 0) return;
  switch (scalar) {
    case RopeScalar::kHalf:
      return launch<c10::Half>(args, rounding, backward, stream);
    case RopeScalar::kBFloat16:
      return launch<c10::BFloat16>(args, rounding, backward, stream);
    case RopeScalar::kFloat:
      return launch<float>(args, rounding, backward, stream);
    case RopeScalar::kDouble:
      return launch<double>(args, rounding, backward, stream);
  }
}

}  // namespace megagraph
