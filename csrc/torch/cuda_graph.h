// SPDX-License-Identifier: Apache-2.0
// Torch's CUDA graph, with what is protected in it, and with an end for captures that fail. For
// CUDA builds.
//
// Releases differ, as their sources say, and the calls in their compiled capture_end() and reset():
//
//   a generator joins a graph          up to 2.13 by hand, since 2.14 with its first use there
//   its state while capturing          2.11 a flag; since 2.12 one for each capture, which reset()
//                                      removes
//   a capture_end() that fails         up to 2.12 leaves the routing to the pool on; since 2.13 it
//                                      ends it
//   reset() gives the pool back        up to 2.13 after a finished capture only; since 2.14 always,
//                                      and ends the routing where that is on
//   reset() frees cuBLAS workspaces    since 2.12, those of the capture stream
//
// Note [A failed capture]
// CUDAGraph::capture_end() throws when the capture was broken, and what is open then depends on the
// release (pytorch#180395, pytorch#190308). TorchGraph::abort() leaves nothing open and gives back
// nothing twice:
// - A stream that still captures is ended here, since reset() does not; torch 2.13 and newer count
//   the captures of a device, so this one is counted off, which capture_end() had no time for.
// - The pool's references: where reset() will not give them back (capture_ended_ up to 2.13,
//   allocated_pool_ since) they are given back here (end_routing_to()). In 2.13 the routing may
//   have ended and the references not: whether the capture began tells, not whether it routes.
// - Generators: the flag is cleared here in 2.11, later ones are forgotten by reset().
// - Last comes reset(); whatever it got to, the destructor then has no pool to give back.
//
// Note [Workspaces of the capture stream]
// torch keeps a cuBLAS workspace for each handle and stream, and graphs hold its address. When any
// graph ends, torch may free those of its capture stream, also where other graphs were captured on
// it (pytorch#193402): a bank that is captured anew would pull the workspace from under the banks
// of other models, and a failed attempt from under the variants before it. So each graph, before
// its end, takes a stream for its own on which nothing was ever captured.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <cuda_runtime_api.h>

namespace megagraph {

class TorchGraph : private at::cuda::CUDAGraph {
 public:
  TorchGraph() = default;
  ~TorchGraph();
  TorchGraph(const TorchGraph&) = delete;
  TorchGraph& operator=(const TorchGraph&) = delete;

  // Before the capture begins: what it may draw from beside the device's default generator.
  void register_generator(const at::Generator& generator);

  // On the current stream, thread-local; once.
  void begin(c10::MempoolId_t pool);
  void end();
  // Note [A failed capture]. Does nothing before begin() and after end().
  void abort() noexcept;

  cudaGraphExec_t exec() const { return graph_exec_; }
  bool uses_rng() const;
  // Launches on the current stream, and advances the generators as eager would.
  using at::cuda::CUDAGraph::replay;

 private:
  enum class State { kNew, kBeginning, kCapturing, kDone };

  void end_stream_capture() noexcept;
  bool gives_pool_back() const;
  void keep_workspaces() noexcept;

  State state_ = State::kNew;
};

}  // namespace megagraph
