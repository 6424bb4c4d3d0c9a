// SPDX-License-Identifier: Apache-2.0
// The rotation of one pair, for host and device alike.
//
// Note [RoPE bits]
// Megatron's unfused path computes (t * cos) + (rotate_half(t) * sin) with tables already cast to
// t's dtype, so each product and the sum are rounded to that dtype. The functions below do the same
// operations in the same dtype, in both directions; the extension is compiled without contraction
// to fused multiply-add, so float and double agree with it bit for bit as well.
#pragma once

#include <c10/macros/Macros.h>

#include <cstdint>

namespace megagraph {

// Where the two members of pair i lie, in a rotary part of 2 * half elements.
//   kNeox:        input and output at i and half + i
//   kInterleaved: input and output at 2i and 2i + 1
//   kMla:         input at 2i and 2i + 1, output at i and half + i (DeepSeek's decoupled part)
enum class RopeLayout : int32_t { kNeox, kInterleaved, kMla };

template <typename scalar_t>
struct RopePair {
  scalar_t first;
  scalar_t second;
};

template <typename scalar_t>
C10_HOST_DEVICE inline RopePair<scalar_t> rotate_pair(RopePair<scalar_t> x, RopePair<scalar_t> cos,
                                                      RopePair<scalar_t> sin) {
  const scalar_t first_cos = x.first * cos.first;
  const scalar_t second_cos = x.second * cos.second;
  const scalar_t first_sin = -x.second * sin.first;
  const scalar_t second_sin = x.first * sin.second;
  return {first_cos + first_sin, second_cos + second_sin};
}

// Transposed: gradient of the input pair from the gradient of the output pair.
template <typename scalar_t>
C10_HOST_DEVICE inline RopePair<scalar_t> rotate_pair_back(RopePair<scalar_t> grad,
                                                           RopePair<scalar_t> cos,
                                                           RopePair<scalar_t> sin) {
  const scalar_t first_cos = grad.first * cos.first;
  const scalar_t second_cos = grad.second * cos.second;
  const scalar_t first_sin = grad.first * sin.first;
  const scalar_t second_sin = grad.second * sin.second;
  return {first_cos + second_sin, second_cos + -first_sin};
}

}  // namespace megagraph
