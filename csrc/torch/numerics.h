// SPDX-License-Identifier: Apache-2.0
// Torch's process-wide settings that choose kernels or change their bits.
//
// Releases differ: the precision of float32 has enums since torch 2.10 (before, strings).
// Since 2.13 convolutions have a precision DEFAULT, which is what they do unless told, where it was
// TF32; both are compared as they are.
#pragma once

#include <c10/core/DeviceType.h>

#include <string>

namespace megagraph {

struct NumericSettings {
  bool deterministic, deterministic_warn_only, cudnn_benchmark, cudnn_deterministic, autocast;
  int matmul_precision, conv_precision, fp16_reduction, bf16_reduction, fp16_accumulation;
  int autocast_dtype;

  static NumericSettings current(c10::DeviceType device);
  bool operator==(const NumericSettings& other) const;
  // The first setting that differs, by name; for reports.
  std::string difference(const NumericSettings& other) const;
};

bool uses_deterministic_algorithms();

}  // namespace megagraph
