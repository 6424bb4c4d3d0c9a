// SPDX-License-Identifier: Apache-2.0
// Marks a replay for profilers: as a range of torch's, and on a GPU as one of NVTX, as torch does.
//
// No release differs. The stubs are torch's: on a machine without CUDA they throw.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <optional>
#include <string>

namespace megagraph {

// Open while it lives. Nothing happens for an empty name.
class Range {
 public:
  Range(const std::string& name, c10::Device device) {
    if (name.empty()) return;
    record_.emplace(at::RecordScope::USER_SCOPE);
    if (record_->isActive()) record_->before(name);
    if (device.is_cuda()) {
      torch::profiler::impl::cudaStubs()->rangePush(name.c_str());
      is_pushed_ = true;
    }
  }
  ~Range() {
    if (is_pushed_) torch::profiler::impl::cudaStubs()->rangePop();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  std::optional<at::RecordFunction> record_;
  bool is_pushed_ = false;
};

}  // namespace megagraph
