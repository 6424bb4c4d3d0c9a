// SPDX-License-Identifier: Apache-2.0
// Pads document offsets to a fixed capacity. The tail entries repeat the last offset, or hold `end`
// (the physical end of the buffer), so every document slot past the real ones is empty.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "csrc/ops/checks.h"
#ifdef MEGAGRAPH_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "csrc/ops/kernels.h"
#endif

namespace megagraph {
namespace {

at::Tensor pad_cu_seqlens_meta(const at::Tensor& cu_seqlens, c10::SymInt capacity,
                               std::optional<c10::SymInt> end) {
  check_cu_seqlens(cu_seqlens, "pad_cu_seqlens");
  TORCH_CHECK_VALUE(!end || (*end >= 0 && *end <= std::numeric_limits<int32_t>::max()),
                    "pad_cu_seqlens: end must be a row that int32 can name, got ", *end);
  const c10::SymInt num_seqs = cu_seqlens.sym_size(0) - 1;
  TORCH_CHECK_VALUE(num_seqs <= capacity, "pad_cu_seqlens: the pack holds ", num_seqs,
                    " documents, more than the capacity of ", capacity);
  return at::empty_symint({capacity + 1}, cu_seqlens.options());
}

at::Tensor pad_cu_seqlens_cpu(const at::Tensor& cu_seqlens, int64_t capacity,
                              std::optional<int64_t> end) {
  at::Tensor out = pad_cu_seqlens_meta(cu_seqlens, capacity, end);
  const int32_t* in = cu_seqlens.const_data_ptr<int32_t>();
  int32_t* data = out.mutable_data_ptr<int32_t>();
  const int64_t given = cu_seqlens.numel();
  TORCH_CHECK_VALUE(!end || *end >= in[given - 1], "pad_cu_seqlens: end ", *end,
                    " is before the last offset ", in[given - 1]);
  std::copy_n(in, given, data);
  std::fill(data + given, data + out.numel(), static_cast<int32_t>(end.value_or(in[given - 1])));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CPU, m) { m.impl("pad_cu_seqlens", pad_cu_seqlens_cpu); }
TORCH_LIBRARY_IMPL(megagraph, Meta, m) { m.impl("pad_cu_seqlens", pad_cu_seqlens_meta); }

#ifdef MEGAGRAPH_WITH_CUDA
namespace {

at::Tensor pad_cu_seqlens_cuda(const at::Tensor& cu_seqlens, int64_t capacity,
                               std::optional<int64_t> end) {
  const c10::cuda::CUDAGuard guard(cu_seqlens.device());
  at::Tensor out = pad_cu_seqlens_meta(cu_seqlens, capacity, end);
  const int32_t last = static_cast<int32_t>(end.value_or(0));
  pad_offsets(cu_seqlens.const_data_ptr<int32_t>(), cu_seqlens.numel(),
              out.mutable_data_ptr<int32_t>(), out.numel(), end ? &last : nullptr,
              c10::cuda::getCurrentCUDAStream());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CUDA, m) { m.impl("pad_cu_seqlens", pad_cu_seqlens_cuda); }
#endif

}  // namespace megagraph
