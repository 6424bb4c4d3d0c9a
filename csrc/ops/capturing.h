// SPDX-License-Identifier: Apache-2.0
// What a stream captures at the moment. For CUDA builds.
#pragma once

#include <c10/cuda/CUDAException.h>

#include <optional>
#include <vector>

namespace megagraph {

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

}  // namespace megagraph
