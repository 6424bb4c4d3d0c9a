// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/capture/cuda_capture.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <utility>

#include "csrc/ops/document_grids.h"
#include "csrc/torch/cuda_graph.h"
#include "csrc/torch/cuda_streams.h"

namespace megagraph {
namespace {

OwnStreams capture_streams;

class Graph : public TorchGraph {
 public:
  std::vector<DocumentGrid> document_grids;
};

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

std::unique_ptr<Executable> capture_work(const PassPools& pools,
                                         const std::vector<at::Generator>& generators,
                                         std::shared_ptr<PoolHold> scratch,
                                         std::shared_ptr<PassMemory> memory,
                                         const std::function<void()>& body,
                                         const std::function<void()>& give_back) {
  auto graph = std::make_unique<Graph>();
  std::optional<PassWatch> watch;
  if (scratch != nullptr) {
    watch.emplace(scratch->device(), pools, scratch->pool(), std::move(memory));
  }
  for (const at::Generator& generator : generators) graph->register_generator(generator);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  try {
    graph->begin(pools.own);
    if (watch) watch->begin();
    DocumentGridCollector collector(stream.stream());
    body();
    if (watch) watch->end();
    graph->end();
    graph->document_grids = collector.take();
    C10_CUDA_CHECK(cudaGraphUpload(graph->exec(), stream));
    give_back();
    if (watch) watch->close();
  } catch (...) {
    if (watch) watch->abort();
    graph->abort();
    throw;
  }
  return std::make_unique<CudaExecutable>(std::move(graph), std::move(scratch));
}

uint64_t capture_stream(c10::DeviceIndex device) {
  return reinterpret_cast<uint64_t>(capture_streams.of(device));
}

}  // namespace megagraph
