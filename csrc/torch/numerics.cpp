// SPDX-License-Identifier: Apache-2.0
#include "csrc/torch/numerics.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/hash.h>
#include <torch/csrc/python_headers.h>

#include <atomic>
#include <cstddef>
#include <string_view>

#include "csrc/torch/made_once.h"
#include "csrc/torch/version.h"

namespace megagraph {
namespace {

constexpr std::array<const char*, 29> kNames = {
    "deterministic algorithms",
    "deterministic warn-only",
    "filling of uninitialized memory",
    "cuDNN enabled",
    "cuDNN benchmark",
    "cuDNN benchmark limit",
    "cuDNN deterministic",
    "MKLDNN enabled",
    "MKLDNN deterministic",
    "autocast",
    "autocast dtype",
    "default dtype",
    "float32 matmul precision",
    "float32 convolution precision",
    "float16 reduced-precision reduction",
    "bfloat16 reduced-precision reduction",
    "float16 accumulation",
    "preferred BLAS library",
    "preferred linear algebra library",
    "multiprocessors left to others",
    "flash attention",
    "flash attention of newer generations",
    "memory-efficient attention",
    "plain attention",
    "cuDNN attention",
    "attention that a backend overrides",
    "reduced-precision reduction in plain attention",
    "order of attention backends",
    "fast path of torch's transformer layers",
};

constexpr size_t kAutocastDtype = 10;
static_assert(std::string_view(kNames[kAutocastDtype]) == "autocast dtype");

// Unset means the full precision, as torch's own comparisons with TF32 take it.
int precision_of(at::Float32Op op) {
  const auto precision = at::globalContext().float32Precision(at::Float32Backend::CUDA, op);
  return static_cast<int>(precision == at::Float32Precision::NONE ? at::Float32Precision::IEEE
                                                                  : precision);
}

int order_of_attention(at::Context& context) {
  int digits = 0;
  for (const at::SDPBackend backend : context.sDPPriorityOrder()) {
    digits = digits * 10 + static_cast<int>(backend) + 2;
  }
  return digits;
}

int newer_flash(const at::Context& context) {
#if MEGAGRAPH_TORCH_SINCE(2, 15)
  return 2 * context.userEnabledFA4SDP() + context.userEnabledFA3SDP();
#else
  return context.userEnabledFA3SDP();
#endif
}

// A variable of Python's. It matters without gradients only: a backward, which has no GIL, takes
// what was read last.
int fast_path() {
  static std::atomic<int> last{1};
  if (!PyGILState_Check()) return last;
  PyObject* const module = made_once([] { return PyImport_ImportModule("torch.backends.mha"); });
  static PyObject* const name = PyUnicode_InternFromString("_is_fastpath_enabled");
  PyObject* flag = nullptr;
  if (module != nullptr) flag = PyDict_GetItemWithError(PyModule_GetDict(module), name);
  if (flag == nullptr) PyErr_Clear();
  if (flag != nullptr) last = flag == Py_True;
  return last;
}

}  // namespace

NumericSettings NumericSettings::current(c10::DeviceType device) {
  at::Context& context = at::globalContext();
  const bool autocast = at::autocast::is_autocast_enabled(device);
  NumericSettings settings;
  settings.values_ = {
      context.deterministicAlgorithms(),
      context.deterministicAlgorithmsWarnOnly(),
      context.deterministicFillUninitializedMemory(),
      context.userEnabledCuDNN(),
      context.benchmarkCuDNN(),
      context.benchmarkLimitCuDNN(),
      context.deterministicCuDNN(),
      context.userEnabledMkldnn(),
      context.deterministicMkldnn(),
      autocast,
      autocast ? static_cast<int>(at::autocast::get_autocast_dtype(device)) : 0,
      static_cast<int>(c10::get_default_dtype_as_scalartype()),
      precision_of(at::Float32Op::MATMUL),
      precision_of(at::Float32Op::CONV),
      static_cast<int>(context.allowFP16ReductionCuBLAS()),
      static_cast<int>(context.allowBF16ReductionCuBLAS()),
      context.allowFP16AccumulationCuBLAS(),
      static_cast<int>(context.blasPreferredBackend()),
      static_cast<int>(context.linalgPreferredBackend()),
      context._SMCarveout_EXPERIMENTAL().value_or(-1),
      context.userEnabledFlashSDP(),
      newer_flash(context),
      context.userEnabledMemEfficientSDP(),
      context.userEnabledMathSDP(),
      context.userEnabledCuDNNSDP(),
      context.userEnabledOverrideableSDP(),
      context.allowFP16BF16ReductionMathSDP(),
      order_of_attention(context),
      fast_path(),
  };
  return settings;
}

std::string NumericSettings::difference(const NumericSettings& other) const {
  for (size_t i = 0; i < values_.size(); ++i) {
    if (values_[i] != other.values_[i]) return kNames[i];
  }
  return "";
}

std::string NumericSettings::difference_in_backward(const NumericSettings& other) const {
  NumericSettings here = other;
  here.values_[kAutocastDtype] = values_[kAutocastDtype];
  return difference(here);
}

size_t NumericSettings::hash() const {
  size_t hash = values_.size();
  for (const int value : values_) hash = c10::hash_combine(hash, static_cast<size_t>(value));
  return hash;
}

bool uses_deterministic_algorithms() { return at::globalContext().deterministicAlgorithms(); }

Unfilled::Unfilled() : before_(at::globalContext().deterministicFillUninitializedMemory()) {
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

Unfilled::~Unfilled() { at::globalContext().setDeterministicFillUninitializedMemory(before_); }

}  // namespace megagraph
