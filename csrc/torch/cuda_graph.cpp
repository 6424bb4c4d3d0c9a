// SPDX-License-Identifier: Apache-2.0
#include "csrc/torch/cuda_graph.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "csrc/torch/attempt.h"
#include "csrc/torch/graph_pool.h"
#include "csrc/torch/cuda_streams.h"
#include "csrc/torch/version.h"

namespace megagraph {
namespace {

OwnStreams unused_streams;

}  // namespace

TorchGraph::~TorchGraph() { keep_workspaces(); }

void TorchGraph::register_generator([[maybe_unused]] const at::Generator& generator) {
#if !MEGAGRAPH_TORCH_SINCE(2, 14)
  register_generator_state(generator);
#endif
}

void TorchGraph::begin(c10::MempoolId_t pool) {
  state_ = State::kBeginning;
  capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  state_ = State::kCapturing;
}

void TorchGraph::end() {
  capture_end();
  state_ = State::kDone;
}

bool TorchGraph::uses_rng() const {
  for (const auto& [state, increment] : captured_generator_states_) {
    if (increment != 0) return true;
  }
  return false;
}

void TorchGraph::abort() noexcept {
  if (state_ == State::kNew || state_ == State::kDone) return;
  const bool has_begun = state_ == State::kCapturing;
  state_ = State::kDone;
  end_stream_capture();
  if (!gives_pool_back()) end_routing_to(capture_dev_, mempool_id_, has_begun);
#if !MEGAGRAPH_TORCH_SINCE(2, 12)
  for (const auto& [generator, increment] : captured_generator_states_) {
    generator->capturing_ = false;  // its capture_epilogue() is not exported
  }
#endif
  keep_workspaces();
  attempt([&] { reset(); });
  capture_ended_ = false;
#if MEGAGRAPH_TORCH_SINCE(2, 14)
  allocated_pool_ = capturing_to_pool_ = false;
  retained_mempool_ids_.clear();
#endif
  static_cast<void>(cudaGetLastError());
}

void TorchGraph::end_stream_capture() noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(capture_stream_, &status) == cudaSuccess &&
      status != cudaStreamCaptureStatusNone) {
    cudaGraph_t broken = nullptr;
    cudaStreamEndCapture(capture_stream_, &broken);
    if (broken != nullptr) cudaGraphDestroy(broken);
#if MEGAGRAPH_TORCH_SINCE(2, 13)
    if (capture_id_ != 0) {
      attempt([&] { c10::cuda::CUDACachingAllocator::markCaptureEnd(capture_dev_); });
    }
#endif
  }
  static_cast<void>(cudaGetLastError());
}

bool TorchGraph::gives_pool_back() const {
#if MEGAGRAPH_TORCH_SINCE(2, 14)
  return allocated_pool_;
#else
  return capture_ended_;
#endif
}

// Note [Workspaces of the capture stream]
void TorchGraph::keep_workspaces() noexcept {
  if (state_ == State::kNew) return;
  attempt([&] {
    capture_stream_ =
        c10::cuda::getStreamFromExternal(unused_streams.of(capture_dev_), capture_dev_);
  });
}

}  // namespace megagraph
