// SPDX-License-Identifier: Apache-2.0
// Captures work of the current stream into an executable, and undoes a capture that failed. Defined
// in CUDA builds.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <memory>
#include <utility>
#include <vector>

#include "csrc/bank/executable.h"
#include "csrc/torch/graph_pool.h"
#include "csrc/torch/pass_memory.h"

namespace megagraph {

// One capture: begin, then end or abort. The destructor aborts what was neither.
class CudaCapture {
 public:
  // `generators` are registered with the graph beside the device's default one. With `scratch`,
  // what is temporary comes from there, and what is given back from `lent`, once `memory` knows the
  // pass; else the capture learns it.
  CudaCapture(std::pair<uint64_t, uint64_t> pool, const std::vector<at::Generator>& generators,
              std::shared_ptr<PoolHold> scratch, std::pair<uint64_t, uint64_t> lent,
              std::shared_ptr<PassMemory> memory);
  ~CudaCapture();
  CudaCapture(const CudaCapture&) = delete;
  CudaCapture& operator=(const CudaCapture&) = delete;

  // On the current stream, which must not be the default one. Only unsafe calls of this thread are
  // errors meanwhile (thread-local mode).
  void begin();
  std::unique_ptr<Executable> end();
  // Once what the pass gives back is given back: throws where it had to be and is not.
  void close();

  // Leaves nothing behind: the stream no longer captures, neither allocator routes to the pool, no
  // generator believes in a capture, the pool's reference is dropped. Never throws. May be called
  // in any state; a second call does nothing. csrc/torch/cuda_graph.h, Note [A failed capture].
  void abort() noexcept;

 private:
  class Graph;
  std::unique_ptr<Graph> graph_;
  const std::pair<uint64_t, uint64_t> pool_;
  const std::shared_ptr<PoolHold> scratch_;
  std::unique_ptr<PassWatch> watch_;
};

// A process-wide non-default stream for captures, one a device, as its raw handle. Blocks of a pool
// belong to the stream they were allocated on, so one stream lets all captures share them.
uint64_t capture_stream(c10::DeviceIndex device);

}  // namespace megagraph
