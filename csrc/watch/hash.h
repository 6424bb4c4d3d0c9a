// SPDX-License-Identifier: Apache-2.0
// Hashes that hold for this process only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace megagraph {

// Spreads every bit of `value` over all bits (the finalizer of splitmix64, by S. Vigna).
inline size_t spread(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

// Of a sequence.
class Hash {
 public:
  explicit Hash(size_t seed = 0) : value_(seed) {}
  void mix(size_t value) { value_ = spread(value_ * 3 + value + 0x9e3779b97f4a7c15ULL); }
  void mix(const void* pointer) { mix(reinterpret_cast<size_t>(pointer)); }
  size_t value() const { return value_; }

 private:
  size_t value_;
};

}  // namespace megagraph
