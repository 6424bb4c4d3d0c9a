// SPDX-License-Identifier: Apache-2.0
#include "csrc/torch/numerics.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <array>
#include <utility>

#include "csrc/torch/version.h"

namespace megagraph {
namespace {

using Named = std::pair<const char*, int>;

std::array<Named, 11> named(const NumericSettings& s) {
  return {{{"deterministic algorithms", s.deterministic},
           {"deterministic warn-only", s.deterministic_warn_only},
           {"cuDNN benchmark", s.cudnn_benchmark},
           {"cuDNN deterministic", s.cudnn_deterministic},
           {"autocast", s.autocast},
           {"float32 matmul precision", s.matmul_precision},
           {"float32 convolution precision", s.conv_precision},
           {"float16 reduced-precision reduction", s.fp16_reduction},
           {"bfloat16 reduced-precision reduction", s.bf16_reduction},
           {"float16 accumulation", s.fp16_accumulation},
           {"autocast dtype", s.autocast_dtype}}};
}

// Unset means the full precision, as torch's own comparisons with TF32 take it.
int precision_of(at::Float32Op op) {
  const auto precision = at::globalContext().float32Precision(at::Float32Backend::CUDA, op);
  return static_cast<int>(precision == at::Float32Precision::NONE ? at::Float32Precision::IEEE
                                                                  : precision);
}

}  // namespace

NumericSettings NumericSettings::current(c10::DeviceType device) {
  const at::Context& context = at::globalContext();
  NumericSettings s{};
  s.deterministic = context.deterministicAlgorithms();
  s.deterministic_warn_only = context.deterministicAlgorithmsWarnOnly();
  s.cudnn_benchmark = context.benchmarkCuDNN();
  s.cudnn_deterministic = context.deterministicCuDNN();
  s.autocast = at::autocast::is_autocast_enabled(device);
  s.matmul_precision = precision_of(at::Float32Op::MATMUL);
  s.conv_precision = precision_of(at::Float32Op::CONV);
  s.fp16_reduction = static_cast<int>(context.allowFP16ReductionCuBLAS());
  s.bf16_reduction = static_cast<int>(context.allowBF16ReductionCuBLAS());
  s.fp16_accumulation = context.allowFP16AccumulationCuBLAS();
  s.autocast_dtype = s.autocast ? static_cast<int>(at::autocast::get_autocast_dtype(device)) : 0;
  return s;
}

bool NumericSettings::operator==(const NumericSettings& other) const {
  return named(*this) == named(other);
}

std::string NumericSettings::difference(const NumericSettings& other) const {
  const auto mine = named(*this), theirs = named(other);
  for (size_t i = 0; i < mine.size(); ++i) {
    if (mine[i].second != theirs[i].second) return mine[i].first;
  }
  return "";
}

bool uses_deterministic_algorithms() { return at::globalContext().deterministicAlgorithms(); }

}  // namespace megagraph
