// SPDX-License-Identifier: Apache-2.0
// Pairs in registers: what the kernels of rope_thd and rope_mla_ share.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "csrc/ops/rope_rotation.h"

namespace megagraph {

// Two elements in one register; void if there is no such type.
template <typename scalar_t>
using Packed =
    std::conditional_t<std::is_same_v<scalar_t, c10::BFloat16>, __nv_bfloat162,
                       std::conditional_t<std::is_same_v<scalar_t, c10::Half>, __half2, void>>;

template <typename scalar_t, int kVec>
struct alignas(sizeof(scalar_t) * kVec) Vec {
  scalar_t at[kVec];
};

template <int kBytes>
struct WordOf;
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};

template <int kBytes>
using Word = typename WordOf<kBytes>::type;

// Into global memory in one access, whatever the compiler knows: it splits a struct that is one of
// two into its members, whose stores then take several times as long.
template <typename word_t>
__device__ void store_word(void* to, word_t word) {
  if constexpr (sizeof(word_t) == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(to)), "r"(word.x), "r"(word.y), "r"(word.z),
                   "r"(word.w)
                 : "memory");
  } else if constexpr (sizeof(word_t) == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};"
                 :
                 : "l"(__cvta_generic_to_global(to)), "r"(word.x), "r"(word.y)
                 : "memory");
  } else {
    *static_cast<word_t*>(to) = word;
  }
}
template <typename V>
__device__ V load_whole(const void* from) {
  const auto word = *static_cast<const Word<sizeof(V)>*>(from);
  V found;
  memcpy(&found, &word, sizeof(V));
  return found;
}
template <typename V>
__device__ void store_whole(void* to, const V& value) {
  Word<sizeof(V)> word;
  memcpy(&word, &value, sizeof(V));
  store_word(to, word);
}

// kVec pairs: their first members and their second ones.
template <typename scalar_t, int kVec>
struct Pairs {
  using V = Vec<scalar_t, kVec>;
  V first, second;

  // The pairs of a chunk lie either in two runs that are half a rotary part apart (split) or side
  // by side in one run (adjacent).
  __device__ void load(const scalar_t* base, int chunk, int half, bool split) {
    const int step = split ? half : kVec;
    const scalar_t* at = base + (split ? chunk * kVec : 2 * chunk * kVec);
    first = load_whole<V>(at);
    second = load_whole<V>(at + step);
  }
  __device__ void store(scalar_t* base, int chunk, int half, bool split) const {
    const int step = split ? half : kVec;
    scalar_t* at = base + (split ? chunk * kVec : 2 * chunk * kVec);
    store_whole(at, first);
    store_whole(at + step, second);
  }
  // From two halves of a run of adjacent pairs, and back.
  __device__ Pairs unzipped() const {
    Pairs result = *this;
    if constexpr (kVec > 1) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const V& from = 2 * i < kVec ? first : second;
        result.first.at[i] = from.at[2 * i % kVec];
        result.second.at[i] = from.at[2 * i % kVec + 1];
      }
    }
    return result;
  }
  __device__ Pairs zipped() const {
    Pairs result = *this;
    if constexpr (kVec > 1) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        V& to = 2 * i < kVec ? result.first : result.second;
        to.at[2 * i % kVec] = first.at[i];
        to.at[2 * i % kVec + 1] = second.at[i];
      }
    }
    return result;
  }
};

// rotate_pair() and rotate_pair_back(), two pairs at once.
template <RopeRounding rounding, bool backward, typename packed_t>
__device__ void rotate_packed(packed_t& first, packed_t& second, packed_t cos_first,
                              packed_t cos_second, packed_t sin_first, packed_t sin_second) {
  const packed_t second_cos = __hmul2_rn(second, cos_second);
  if constexpr (rounding == RopeRounding::kFused) {
    const packed_t crossed = __hmul2_rn(second, backward ? sin_second : sin_first);
    const packed_t other =
        __hfma2(backward ? __hneg2(first) : first, backward ? sin_first : sin_second, second_cos);
    first = __hfma2(first, cos_first, backward ? crossed : __hneg2(crossed));
    second = other;
    return;
  }
  const packed_t first_cos = __hmul2_rn(first, cos_first);
  if constexpr (backward) {
    const packed_t first_sin = __hmul2_rn(first, sin_first);
    const packed_t second_sin = __hmul2_rn(second, sin_second);
    first = __hadd2_rn(first_cos, second_sin);
    second = __hadd2_rn(second_cos, __hneg2(first_sin));
  } else {
    const packed_t first_sin = __hmul2_rn(__hneg2(second), sin_first);
    const packed_t second_sin = __hmul2_rn(first, sin_second);
    first = __hadd2_rn(first_cos, first_sin);
    second = __hadd2_rn(second_cos, second_sin);
  }
}

template <RopeRounding rounding, bool backward, typename scalar_t, int kVec>
__device__ Pairs<scalar_t, kVec> rotate(Pairs<scalar_t, kVec> x, const Pairs<scalar_t, kVec>& cos,
                                        const Pairs<scalar_t, kVec>& sin) {
  using packed_t = Packed<scalar_t>;
  if constexpr (!std::is_void_v<packed_t> && kVec % 2 == 0) {
    using Lanes = Vec<packed_t, kVec / 2>;
    auto& first = reinterpret_cast<Lanes&>(x.first);
    auto& second = reinterpret_cast<Lanes&>(x.second);
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      rotate_packed<rounding, backward>(first.at[i], second.at[i],
                                        reinterpret_cast<const Lanes&>(cos.first).at[i],
                                        reinterpret_cast<const Lanes&>(cos.second).at[i],
                                        reinterpret_cast<const Lanes&>(sin.first).at[i],
                                        reinterpret_cast<const Lanes&>(sin.second).at[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const RopePair<scalar_t> pair{x.first.at[i], x.second.at[i]};
      const RopePair<scalar_t> c{cos.first.at[i], cos.second.at[i]};
      const RopePair<scalar_t> s{sin.first.at[i], sin.second.at[i]};
      const auto y =
          backward ? rotate_pair_back<rounding>(pair, c, s) : rotate_pair<rounding>(pair, c, s);
      x.first.at[i] = y.first;
      x.second.at[i] = y.second;
    }
  }
  return x;
}

}  // namespace megagraph
