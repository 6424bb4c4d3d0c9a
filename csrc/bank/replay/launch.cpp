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

class Launch::InOrder {
 public:
  explicit InOrder(c10::DeviceIndex device)
      : last_(last_launch_on(device)),
        lock_(last_.mutex),
        stream_(c10::cuda::getCurrentCUDAStream(device)) {
    if (last_.stream && *last_.stream != stream_) {
      if (is_default(*last_.stream)) last_.done.record(*last_.stream);
      last_.done.block(stream_);
    }
  }
  ~InOrder() {
    last_.stream = stream_;
    if (!is_default(stream_)) attempt([&] { last_.done.record(stream_); });
  }
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;

 private:
  LastLaunch& last_;
  const std::lock_guard<std::recursive_mutex> lock_;
  const c10::cuda::CUDAStream stream_;
};

Launch::Launch(c10::Device device) : guard_(device) {
  if (device.is_cuda()) in_order_ = std::make_unique<InOrder>(device.index());
}

#else

class Launch::InOrder {};

Launch::Launch(c10::Device device) : guard_(device) {}

#endif

Launch::~Launch() = default;

}  // namespace megagraph
