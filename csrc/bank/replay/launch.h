// SPDX-License-Identifier: Apache-2.0
// The conditions under which graphs are launched.
//
// Note [One stream after another]
// All graphs of a device were captured on one stream. So they share its cuBLAS workspace, where
// they draw the place of the random offset, and slots their temporary memory
// (csrc/torch/pass_memory.h, Note [Scratch]); and a slot is free when its backward has been
// enqueued, not when it is done. On one stream that is order enough. Where the caller has changed
// to another stream, of the same model or of another one, the launch first waits for all that is on
// the one before: launches, and what reads their results behind them. So does what fills a freed
// slot with NaN. A stream that torch keeps can be asked for an event at that time; another one may
// be gone by then, or in a capture, so each launch leaves one, and what reads its results must be
// done.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>

#include <optional>

namespace megagraph {

// While it lives: `device` is the current one, and what is launched on its current stream comes
// after every earlier launch there. One thread may nest them. Nobody waits for the GIL inside: who
// holds it may be waiting here.
class Launch {
 public:
  explicit Launch(c10::Device device);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

 private:
  const c10::OptionalDeviceGuard guard_;
  std::optional<c10::Stream> stream_;  // none on the host
};

}  // namespace megagraph
