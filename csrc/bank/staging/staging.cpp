// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/staging/staging.h"

#include <ATen/Functions.h>

#ifdef MEGAGRAPH_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <cstring>

#include "csrc/ops/document_grids.h"

namespace megagraph {
namespace {

void copy_and_zero(const Segment& s, int64_t bytes) {
  if (bytes > 0) std::memcpy(s.dst, s.src, bytes);
  std::memset(static_cast<char*>(s.dst) + bytes, 0, s.dst_size - bytes);
}

void stage_segment(const Segment& s) {
  switch (s.kind) {
    case SegmentKind::kCopy:
      return copy_and_zero(s, s.src_size);
    case SegmentKind::kRows:
      return copy_and_zero(s, std::min(s.src_size, std::max(*s.end, 0) * s.row_bytes));
    case SegmentKind::kOffsets: {
      const auto* in = static_cast<const int32_t*>(s.src);
      auto* out = static_cast<int32_t*>(s.dst);
      std::copy_n(in, s.src_size, out);
      std::fill(out + s.src_size, out + s.dst_size, s.fill >= 0 ? s.fill : in[s.src_size - 1]);
      return;
    }
    case SegmentKind::kMask: {
      const auto* in = static_cast<const bool*>(s.src);
      auto* out = static_cast<bool*>(s.dst);
      for (int64_t row = 0; row < s.dst_size; ++row) {
        out[row] = row >= *s.end || row >= s.src_size || (in != nullptr && in[row]);
      }
      return;
    }
    case SegmentKind::kCount:
      *static_cast<int64_t*>(s.dst) += static_cast<const int32_t*>(s.src)[s.src_size - 1];
      return;
    case SegmentKind::kGrids:
      TORCH_INTERNAL_ASSERT(false, "the host launches no grids");
  }
}

}  // namespace

std::vector<bool> settable_grids(const at::Tensor& table) {
  const auto count = table.numel() / static_cast<int64_t>(sizeof(DocumentGrid));
  at::Tensor settable = at::zeros({count}, table.options().dtype(at::kBool));
#ifdef MEGAGRAPH_WITH_CUDA
  const c10::cuda::CUDAGuard guard(table.device());
  launch_grid_trial(table.const_data_ptr(), count, settable.mutable_data_ptr<bool>(),
                    c10::cuda::getCurrentCUDAStream(table.device().index()).stream());
#endif
  settable = settable.cpu();
  const auto* flags = settable.const_data_ptr<bool>();
  return std::vector<bool>(flags, flags + count);
}

void stage(const SegmentList& segments, c10::Device device) {
  if (segments.count == 0) return;
#ifdef MEGAGRAPH_WITH_CUDA
  if (device.is_cuda()) {
    return launch_staging(segments, c10::cuda::getCurrentCUDAStream(device.index()).stream());
  }
#endif
  TORCH_CHECK(device.is_cpu(), "this build cannot stage on ", device);
  for (int i = 0; i < segments.count; ++i) stage_segment(segments.at[i]);
}

}  // namespace megagraph
