// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/capture/side_branch.h"

#ifdef MEGAGRAPH_WITH_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>

#include "csrc/torch/cuda_streams.h"
#endif

#include <deque>
#include <utility>

namespace megagraph {

#ifdef MEGAGRAPH_WITH_CUDA

namespace {

constexpr size_t kMaxPending = 2;
OwnStreams side_streams;

}  // namespace

struct SideBranch::Pending {
  std::deque<std::pair<at::Tensor, at::cuda::CUDAEvent>> works;
};

void SideBranch::run(const at::Tensor& input, const std::function<void()>& work) {
  if (!input.is_cuda() || !is_capturing()) return work();
  const auto main = c10::cuda::getCurrentCUDAStream(input.device().index());
  const auto side =
      c10::cuda::getStreamFromExternal(side_streams.of(main.device_index()), main.device_index());
  at::cuda::CUDAEvent ready, done;
  ready.record(main);
  ready.block(side);
  {
    const c10::cuda::CUDAStreamGuard guard(side);
    work();
  }
  done.record(side);
  auto& works = pending_->works;
  works.emplace_back(input, std::move(done));
  if (works.size() > kMaxPending) {
    works.front().second.block(main);
    works.pop_front();
  }
}

void SideBranch::join() {
  if (pending_->works.empty()) return;
  // The side stream runs in order: the last one is done when all are.
  auto& [input, done] = pending_->works.back();
  done.block(c10::cuda::getCurrentCUDAStream(input.device().index()));
  pending_->works.clear();
}

void SideBranch::forget() noexcept { pending_->works.clear(); }

#else

struct SideBranch::Pending {};

void SideBranch::run(const at::Tensor&, const std::function<void()>& work) { work(); }
void SideBranch::join() {}
void SideBranch::forget() noexcept {}

#endif

SideBranch::SideBranch([[maybe_unused]] c10::Device device)
    : pending_(std::make_unique<Pending>()) {
#ifdef MEGAGRAPH_WITH_CUDA
  if (device.is_cuda()) side_streams.of(device.index());
#endif
}
SideBranch::~SideBranch() = default;

}  // namespace megagraph
