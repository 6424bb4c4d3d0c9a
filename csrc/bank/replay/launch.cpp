// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/replay/launch.h"

#ifdef MEGAGRAPH_WITH_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#include <optional>
#include <vector>

#include "csrc/torch/attempt.h"
#endif

namespace megagraph {

#ifdef MEGAGRAPH_WITH_CUDA

namespace {

struct LastLaunch {
  std::recursive_mutex mutex;  // a slot may become free, and be poisoned, inside a launch
  std::optional<c10::cuda::CUDAStream> stream;
  at::cuda::CUDAEvent done;  // recorded where the stream is not the default one
};

// Never destroyed: at the end of the process the driver may go first.
LastLaunch& last_launch_on(c10::DeviceIndex device) {
  static auto* const by_device = new std::vector<LastLaunch>(c10::cuda::device_count());
  return by_device->at(device);
}

bool is_default(const c10::cuda::CUDAStream& stream) { return stream.stream() == nullptr; }

}  // namespace

Launch::Launch(c10::Device device) : guard_(device) {
  if (!device.is_cuda()) return;
  LastLaunch& last = last_launch_on(device.index());
  last.mutex.lock();
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  stream_ = stream.unwrap();
  if (!last.stream || *last.stream == stream) return;
  // An error shows in what is launched; the mutex is given back in any case.
  attempt([&] {
    if (is_default(*last.stream)) last.done.record(*last.stream);
    last.done.block(stream);
  });
}

Launch::~Launch() {
  if (!stream_) return;
  LastLaunch& last = last_launch_on(stream_->device_index());
  const c10::cuda::CUDAStream stream(*stream_);
  last.stream = stream;
  if (!is_default(stream)) attempt([&] { last.done.record(stream); });
  last.mutex.unlock();
}

#else

Launch::Launch(c10::Device device) : guard_(device) {}
Launch::~Launch() = default;

#endif

}  // namespace megagraph
