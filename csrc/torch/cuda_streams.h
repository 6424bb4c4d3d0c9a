// SPDX-License-Identifier: Apache-2.0
// What streams capture at the moment, and streams that this process makes for itself. For CUDA
// builds.
//
// No release differs.
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <mutex>
#include <optional>
#include <vector>

namespace megagraph {

// Whether the current stream captures. A capture that has failed and has not ended counts as well.
inline bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// What a stream captures.
struct Capturing {
  unsigned long long id;
  cudaGraph_t graph;  // owned by the stream; may be read, and its nodes' attributes set

  std::vector<cudaGraphNode_t> nodes() const {
    size_t count = 0;
    C10_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> found(count);
    if (count > 0) C10_CUDA_CHECK(cudaGraphGetNodes(graph, found.data(), &count));
    return found;
  }
};

// Nothing if the stream captures nothing, or if its capture is broken.
inline std::optional<Capturing> capturing_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  Capturing found{};
#if CUDART_VERSION >= 13000
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &found.id, &found.graph));
#else
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(stream, &status, &found.id, &found.graph));
#endif
  if (status != cudaStreamCaptureStatusActive) return std::nullopt;
  return found;
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
