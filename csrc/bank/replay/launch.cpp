// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/replay/launch.h"

#ifdef MEGAGRAPH_WITH_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
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
  at::cuda::CUDAEvent done;  // recorded behind each launch that is not on the default stream
};

// Never destroyed: at the end of the process the driver may go first.
LastLaunch& last_launch_on(c10::DeviceIndex device) {
  static auto* const by_device = new std::vector<LastLaunch>(c10::cuda::device_count());
  return by_device->at(device);
}

// Whether the stream can be asked for an event now. Torch keeps its default stream and those of its
// pool; one that somebody else made, known to it by the handle alone, may be gone. One that is
// being captured would draw whoever waits into the capture.
bool can_record_on(const c10::cuda::CUDAStream& stream) {
  const cudaStream_t handle = stream.stream();
  if (!handle) return true;
  if (c10::cuda::getStreamFromExternal(handle, stream.device_index()) == stream) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(handle, &status));
  return status == cudaStreamCaptureStatusNone;
}

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
    if (can_record_on(*last.stream)) last.done.record(*last.stream);
    last.done.block(stream);
  });
}

Launch::~Launch() {
  if (!stream_) return;
  LastLaunch& last = last_launch_on(stream_->device_index());
  const c10::cuda::CUDAStream stream(*stream_);
  last.stream = stream;
  if (stream.stream()) attempt([&] { last.done.record(stream); });
  last.mutex.unlock();
}

#else

Launch::Launch(c10::Device device) : guard_(device) {}
Launch::~Launch() = default;

#endif

}  // namespace megagraph
