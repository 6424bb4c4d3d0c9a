// SPDX-License-Identifier: Apache-2.0
// Whether the current stream captures. For CUDA builds.
//
// No release differs.
#pragma once

#include <c10/cuda/CUDAGraphsC10Utils.h>

namespace megagraph {

// A capture that has failed and has not ended counts as well.
inline bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace megagraph
