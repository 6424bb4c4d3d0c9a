// SPDX-License-Identifier: Apache-2.0
// Torch's process-wide settings that choose kernels or change their bits.
//
// Releases differ: the precision of float32 has enums since torch 2.10 (before, strings).
// Since 2.13 convolutions have a precision DEFAULT, which is what they do unless told, where it was
// TF32; both are compared as they are. Attention has a fourth generation of kernels since 2.15.
#pragma once

#include <c10/core/DeviceType.h>

#include <array>
#include <cstddef>
#include <string>

namespace megagraph {

class NumericSettings {
 public:
  static NumericSettings current(c10::DeviceType device);
  bool operator==(const NumericSettings& other) const { return values_ == other.values_; }
  // The first setting that differs, by name; empty where none does.
  std::string difference(const NumericSettings& other) const;
  // The same for a backward. The dtype of autocast is each thread's own, and autograd's threads
  // have torch's default, in the capture too.
  std::string difference_in_backward(const NumericSettings& other) const;
  // The same in every process.
  size_t hash() const;

 private:
  std::array<int, 29> values_{};  // by name: see numerics.cpp
};

bool uses_deterministic_algorithms();

// Lets at::empty() leave memory as it is in deterministic mode, too. A static buffer is written
// before its graph is launched: a captured fill would overwrite it.
class Unfilled {
 public:
  Unfilled();
  ~Unfilled();
  Unfilled(const Unfilled&) = delete;
  Unfilled& operator=(const Unfilled&) = delete;

 private:
  const bool before_;
};

}  // namespace megagraph
