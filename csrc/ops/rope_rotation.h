// SPDX-License-Identifier: Apache-2.0
// The rotation of one pair, for host and device alike.
//
// Note [RoPE bits]
// Megatron's unfused path computes (t * cos) + (rotate_half(t) * sin) with tables already cast to
// t's dtype, so each product and the sum are rounded to that dtype: kEach. Its fused kernels of
// multi-latent attention write the same sums in the tables' dtype, and their compiler contracts
// each: the product of the pair's second member is rounded, that of the first is added unrounded,
// in both directions: kFused. The functions below do the same operations in the same dtype. The
// extension is compiled without contraction of its own, so all dtypes agree bit for bit.
#pragma once

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace megagraph {

// Where the two members of pair i lie, in a rotary part of 2 * half elements.
//   kNeox:        input and output at i and half + i
//   kInterleaved: input and output at 2i and 2i + 1
//   kMla:         input at 2i and 2i + 1, output at i and half + i (DeepSeek's decoupled part)
enum class RopeLayout : int32_t { kNeox, kInterleaved, kMla };

enum class RopeRounding : int32_t { kEach, kFused };

enum class RopeScalar { kHalf, kBFloat16, kFloat, kDouble };

template <typename scalar_t>
struct RopePair {
  scalar_t first;
  scalar_t second;
};

// x + error as a `narrow_t`: exact, or of its two neighbours the one whose last bit is set. To
// round that to a type with two bits less is to round the exact value. `x` is the nearest double.
template <typename narrow_t>
C10_HOST_DEVICE inline narrow_t rounded_to_odd(double x, double error) {
  const auto narrow = static_cast<narrow_t>(x);
  const double rest = (x - static_cast<double>(narrow)) + error;
  if (rest == 0 || !(std::fabs(narrow) <= std::numeric_limits<narrow_t>::max())) return narrow;
  std::conditional_t<sizeof(narrow_t) == 8, uint64_t, uint32_t> bits;
  std::memcpy(&bits, &narrow, sizeof(narrow));
  if (bits & 1) return narrow;
  const narrow_t infinity = std::numeric_limits<narrow_t>::infinity();
  return std::nextafter(narrow, rest > 0 ? infinity : -infinity);
}

// a * b + c, rounded once.
C10_HOST_DEVICE inline float multiply_add(float a, float b, float c) { return ::fmaf(a, b, c); }
C10_HOST_DEVICE inline double multiply_add(double a, double b, double c) { return ::fma(a, b, c); }
template <typename scalar_t>
C10_HOST_DEVICE inline scalar_t multiply_add(scalar_t a, scalar_t b, scalar_t c) {
  static_assert(sizeof(scalar_t) == 2);
  const double product = double{static_cast<float>(a)} * static_cast<float>(b);  // exact
  const double addend = static_cast<float>(c);
  const double sum = product + addend;
  const double of_addend = sum - product;
  const double error = (product - (sum - of_addend)) + (addend - of_addend);  // exact
  return static_cast<scalar_t>(rounded_to_odd<float>(rounded_to_odd<double>(sum, error), 0));
}

template <RopeRounding rounding, typename scalar_t>
C10_HOST_DEVICE inline RopePair<scalar_t> rotate_pair(RopePair<scalar_t> x, RopePair<scalar_t> cos,
                                                      RopePair<scalar_t> sin) {
  const scalar_t second_cos = x.second * cos.second;
  if constexpr (rounding == RopeRounding::kFused) {
    const scalar_t second_sin = x.second * sin.first;
    return {multiply_add(x.first, cos.first, scalar_t(-second_sin)),
            multiply_add(x.first, sin.second, second_cos)};
  }
  const scalar_t first_cos = x.first * cos.first;
  const scalar_t first_sin = -x.second * sin.first;
  const scalar_t second_sin = x.first * sin.second;
  return {first_cos + first_sin, second_cos + second_sin};
}

// Transposed: gradient of the input pair from the gradient of the output pair.
template <RopeRounding rounding, typename scalar_t>
C10_HOST_DEVICE inline RopePair<scalar_t> rotate_pair_back(RopePair<scalar_t> grad,
                                                           RopePair<scalar_t> cos,
                                                           RopePair<scalar_t> sin) {
  const scalar_t second_cos = grad.second * cos.second;
  const scalar_t second_sin = grad.second * sin.second;
  if constexpr (rounding == RopeRounding::kFused) {
    return {multiply_add(grad.first, cos.first, second_sin),
            multiply_add(scalar_t(-grad.first), sin.first, second_cos)};
  }
  const scalar_t first_cos = grad.first * cos.first;
  const scalar_t first_sin = grad.first * sin.first;
  return {first_cos + second_sin, second_cos + -first_sin};
}

}  // namespace megagraph
