// SPDX-License-Identifier: Apache-2.0
// The only file that knows at::cuda::CUDAGraph.
//
// Note [A failed capture]
// In torch 2.11 a failed capture stays half open: CUDAGraph::capture_end() throws before it ends
// the allocators' routing (pytorch#180395), the pool is released only after a finished capture
// (pytorch#190308), and generators go on believing in it. CudaCapture::abort() ends each of these
// by itself, in the order in which capture_begin() started them, and tolerates those that never
// began.
//
// Note [Workspaces of the capture stream]
// torch keeps a cuBLAS workspace for each handle and stream, and graphs hold its address. In torch
// 2.11 the end of any graph frees those of its capture stream, also where other graphs were
// captured on it (pytorch#193402): a bank that is captured anew would pull the workspace from under
// the banks of other models, and a failed attempt from under the variants before it. So each graph,
// before its end, takes a stream for its own on which nothing was ever captured.

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <optional>
#include <utility>

#include "csrc/bank/capture/cuda_capture.h"
#include "csrc/bank/capture/own_streams.h"
#include "csrc/ops/capturing.h"
#include "csrc/ops/document_grids.h"

namespace megagraph {
namespace {

OwnStreams capture_streams, unused_streams;

// Calls, and answers whether nothing was thrown: abort() must go through all its steps.
template <typename Step>
bool attempt(Step step) noexcept {
  try {
    step();
    return true;
  } catch (...) {
    return false;
  }
}

at::HostAllocator* host_allocator() { return at::getHostAllocator(at::kCUDA); }

// The generator's own flag, where this torch has one (its capture_epilogue is not exported).
template <typename State>
auto stop_generator(State& state, int) -> decltype(static_cast<void>(state.capturing_ = false)) {
  state.capturing_ = false;
}
template <typename State>
void stop_generator(State&, long) {}

}  // namespace

PoolHold::PoolHold(c10::DeviceIndex device, std::pair<uint64_t, uint64_t> pool)
    : device_(device), pool_(pool) {
  c10::cuda::CUDACachingAllocator::createOrIncrefPool(device_, pool_);
  // Pinned memory has a pool of the same name. It can be taken only by routing to it for a moment,
  // and a capture into one that was given up fails (an internal assertion of torch 2.11).
  host_allocator()->begin_allocate_to_pool(pool_, [](c10::Stream) { return false; });
  host_allocator()->end_allocate_to_pool(pool_);
}

PoolHold::~PoolHold() {
  attempt([&] { host_allocator()->release_pool(pool_); });
  attempt([&] { c10::cuda::CUDACachingAllocator::releasePool(device_, pool_); });
}

class CudaCapture::Graph : public at::cuda::CUDAGraph {
 public:
  enum class State { kNew, kCapturing, kDone };

  ~Graph() { keep_workspaces(); }

  cudaGraphExec_t exec() const { return graph_exec_; }
  bool uses_rng() const {
    for (const auto& [state, increment] : captured_generator_states_) {
      if (increment != 0) return true;
    }
    return false;
  }

  void abort() noexcept {
    if (state != State::kCapturing) return;
    state = State::kDone;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(capture_stream_, &status) == cudaSuccess &&
        status != cudaStreamCaptureStatusNone) {
      cudaGraph_t broken = nullptr;
      cudaStreamEndCapture(capture_stream_, &broken);
      if (broken != nullptr) cudaGraphDestroy(broken);
    }
    static_cast<void>(cudaGetLastError());
    if (!capture_ended_) {
      // Each allocator has taken a reference to the pool if, and only if, it still routes to it.
      using namespace c10::cuda::CUDACachingAllocator;
      if (attempt([&] { endAllocateToPool(capture_dev_, mempool_id_); })) {
        attempt([&] { releasePool(capture_dev_, mempool_id_); });
      }
      if (attempt([&] { host_allocator()->end_allocate_to_pool(mempool_id_); })) {
        attempt([&] { host_allocator()->release_pool(mempool_id_); });
      }
    }
    for (const auto& [generator, increment] : captured_generator_states_) {
      stop_generator(*generator, 0);
    }
    keep_workspaces();
    attempt([&] { reset(); });
    capture_ended_ = false;  // whatever reset() got to, the destructor releases nothing again
    static_cast<void>(cudaGetLastError());
  }

  State state = State::kNew;
  int64_t num_nodes = 0;
  std::optional<DocumentGridCollector> collector;
  std::vector<DocumentGrid> document_grids;

 private:
  // Note [Workspaces of the capture stream]
  void keep_workspaces() noexcept {
    if (state == State::kNew) return;
    attempt([&] {
      capture_stream_ =
          c10::cuda::getStreamFromExternal(unused_streams.of(capture_dev_), capture_dev_);
    });
  }
};

namespace {

template <typename Graph>
class CudaExecutable final : public Executable {
 public:
  explicit CudaExecutable(std::unique_ptr<Graph> graph)
      : graph_(std::move(graph)), exec_(graph_->exec()), uses_rng_(graph_->uses_rng()) {}

  void launch() override {
    if (uses_rng_) {
      graph_->replay();  // advances the generators as eager would
    } else {
      C10_CUDA_CHECK(cudaGraphLaunch(exec_, c10::cuda::getCurrentCUDAStream()));
    }
  }
  int64_t num_nodes() const override { return graph_->num_nodes; }
  void* raw() const override { return exec_; }
  const std::vector<DocumentGrid>& document_grids() const override {
    return graph_->document_grids;
  }

 private:
  const std::unique_ptr<Graph> graph_;
  const cudaGraphExec_t exec_;
  const bool uses_rng_;
};

}  // namespace

CudaCapture::CudaCapture(std::pair<uint64_t, uint64_t> pool,
                         const std::vector<at::Generator>& generators)
    : graph_(std::make_unique<Graph>()), pool_(pool) {
  for (const at::Generator& generator : generators) graph_->register_generator_state(generator);
}

CudaCapture::~CudaCapture() { abort(); }

void CudaCapture::begin() {
  TORCH_CHECK(graph_ != nullptr && graph_->state == Graph::State::kNew,
              "a capture can begin only once");
  graph_->state = Graph::State::kCapturing;
  graph_->capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
  graph_->collector.emplace(c10::cuda::getCurrentCUDAStream().stream());
}

std::unique_ptr<Executable> CudaCapture::end() {
  TORCH_CHECK(graph_ != nullptr && graph_->state == Graph::State::kCapturing,
              "a capture can end only after it began");
  // The number of nodes while the graph can still be read.
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto capturing = capturing_of(stream);
  const int64_t num_nodes = capturing ? static_cast<int64_t>(capturing->nodes().size()) : 0;
  graph_->capture_end();
  graph_->num_nodes = num_nodes;
  graph_->document_grids = graph_->collector->take();
  graph_->state = Graph::State::kDone;
  C10_CUDA_CHECK(cudaGraphUpload(graph_->exec(), stream));
  return std::make_unique<CudaExecutable<Graph>>(std::move(graph_));
}

void CudaCapture::abort() noexcept {
  if (graph_ == nullptr) return;
  graph_->abort();
  graph_.reset();
}

uint64_t capture_stream(c10::DeviceIndex device) {
  return reinterpret_cast<uint64_t>(capture_streams.of(device));
}

}  // namespace megagraph
