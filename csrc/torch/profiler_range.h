// SPDX-License-Identifier: Apache-2.0
// Opens and closes a range in the device's profiler (NVTX), as torch itself does.
//
// No release differs. The stubs are torch's: on a machine without CUDA they throw.
#pragma once

#include <torch/csrc/profiler/stubs/base.h>

namespace megagraph {

inline void push_device_range(const char* name) {
  torch::profiler::impl::cudaStubs()->rangePush(name);
}

inline void pop_device_range() { torch::profiler::impl::cudaStubs()->rangePop(); }

}  // namespace megagraph
