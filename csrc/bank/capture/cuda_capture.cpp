// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/capture/cuda_capture.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <utility>

#include "csrc/ops/capturing.h"
#include "csrc/ops/document_grids.h"
#include "csrc/torch/cuda_graph.h"
#include "csrc/torch/cuda_streams.h"

namespace megagraph {
namespace {

OwnStreams capture_streams;

}  // namespace

class CudaCapture::Graph : public TorchGraph {
 public:
  int64_t num_nodes = 0;
  std::optional<DocumentGridCollector> collector;
  std::vector<DocumentGrid> document_grids;
};

namespace {

template <typename Graph>
class CudaExecutable final : public Executable {
 public:
  CudaExecutable(std::unique_ptr<Graph> graph, std::shared_ptr<PoolHold> scratch)
      : graph_(std::move(graph)),
        scratch_(std::move(scratch)),
        exec_(graph_->exec()),
        uses_rng_(graph_->uses_rng()) {}

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
  const std::shared_ptr<PoolHold> scratch_;  // which it may write to
  const cudaGraphExec_t exec_;
  const bool uses_rng_;
};

}  // namespace

CudaCapture::CudaCapture(std::pair<uint64_t, uint64_t> pool,
                         const std::vector<at::Generator>& generators,
                         std::shared_ptr<PoolHold> scratch, std::pair<uint64_t, uint64_t> lent,
                         std::shared_ptr<PassMemory> memory)
    : graph_(std::make_unique<Graph>()), pool_(pool), scratch_(std::move(scratch)) {
  if (scratch_ != nullptr) {
    watch_ = std::make_unique<PassWatch>(scratch_->device(), pool, scratch_->pool(), lent,
                                         std::move(memory));
  }
  for (const at::Generator& generator : generators) graph_->register_generator(generator);
}

CudaCapture::~CudaCapture() { abort(); }

void CudaCapture::begin() {
  TORCH_CHECK(graph_ != nullptr && graph_->state() == Graph::State::kNew,
              "a capture can begin only once");
  graph_->begin(pool_);
  if (watch_ != nullptr) watch_->begin();
  graph_->collector.emplace(c10::cuda::getCurrentCUDAStream().stream());
}

std::unique_ptr<Executable> CudaCapture::end() {
  TORCH_CHECK(graph_ != nullptr && graph_->state() == Graph::State::kCapturing,
              "a capture can end only after it began");
  // The number of nodes while the graph can still be read.
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto capturing = capturing_of(stream);
  const int64_t num_nodes = capturing ? static_cast<int64_t>(capturing->nodes().size()) : 0;
  if (watch_ != nullptr) watch_->end();
  graph_->end();
  graph_->num_nodes = num_nodes;
  graph_->document_grids = graph_->collector->take();
  C10_CUDA_CHECK(cudaGraphUpload(graph_->exec(), stream));
  return std::make_unique<CudaExecutable<Graph>>(std::move(graph_), scratch_);
}

void CudaCapture::close() {
  if (watch_ != nullptr) watch_->close();
}

void CudaCapture::abort() noexcept {
  if (watch_ != nullptr) watch_->abort();
  if (graph_ == nullptr) return;
  graph_->abort();
  graph_.reset();
}

uint64_t capture_stream(c10::DeviceIndex device) {
  return reinterpret_cast<uint64_t>(capture_streams.of(device));
}

}  // namespace megagraph
