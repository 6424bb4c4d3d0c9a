// SPDX-License-Identifier: Apache-2.0
// What the current stream does, and streams that this process makes for itself. For CUDA builds.
//
// No release differs.
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <mutex>
#include <vector>

namespace megagraph {

// Whether it captures. A capture that has failed and has not ended counts as well.
inline bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// One non-blocking stream for each device, made when it is first asked for.
class OwnStreams {
 public:
  cudaStream_t of(c10::DeviceIndex device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (streams_.empty()) streams_.resize(c10::cuda::device_count(), nullptr);
    cudaStream_t& stream = streams_.at(device);
    if (stream == nullptr) {
      const c10::cuda::CUDAGuard guard(device);
      C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }
    return stream;
  }

 private:
  std::mutex mutex_;
  std::vector<cudaStream_t>& streams_ = *new std::vector<cudaStream_t>;  // graphs may end later
};

}  // namespace megagraph
