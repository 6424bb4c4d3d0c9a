// SPDX-License-Identifier: Apache-2.0
// Captures work of the current stream into an executable, and undoes a capture that failed. Defined
// in CUDA builds.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <vector>

#include "csrc/bank/executable.h"
#include "csrc/torch/graph_pool.h"
#include "csrc/torch/pass_memory.h"

namespace megagraph {

// Captures what `body` does on the current stream, which must not be the default one, into a pool.
// Then calls `give_back`, after which what the pass gives back must be gone. Only unsafe calls of
// this thread are errors meanwhile (thread-local mode).
//
// `generators` are registered with the graph beside the device's default one. With `scratch`, what
// is temporary comes from there, and all else from its pool, once `memory` knows the pass; else the
// capture learns it, and all comes from its own pool.
//
// A capture that fails leaves nothing behind: csrc/torch/cuda_graph.h, Note [A failed capture].
std::unique_ptr<Executable> capture_work(const PassPools& pools,
                                         const std::vector<at::Generator>& generators,
                                         std::shared_ptr<PoolHold> scratch,
                                         std::shared_ptr<PassMemory> memory,
                                         const std::function<void()>& body,
                                         const std::function<void()>& give_back);

// A process-wide non-default stream for captures, one a device, as its raw handle. Blocks of a pool
// belong to the stream they were allocated on, so one stream lets all captures share them.
uint64_t capture_stream(c10::DeviceIndex device);

}  // namespace megagraph
