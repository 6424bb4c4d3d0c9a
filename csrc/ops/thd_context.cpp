// SPDX-License-Identifier: Apache-2.0
// Index maps of a pack that context-parallel ranks share: rows as they are gathered rank by rank,
// to and from rows in the order of documents (thd_gathered_rows), and to and from the keys that one
// rank's queries see (thd_context_keys). The former are int32 [2, T]: of each physical row its
// gathered one, and back. The latter are offsets of the queries and of their keys, [2N + 1] each;
// of each of K = T / 2c * (2c + 1) keys its gathered row; and of each gathered row its key for a
// document's first and second chunk, [2, T], K where there is none. Keys past the last offset are
// those of any row.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "csrc/ops/checks.h"
#include "csrc/ops/thd_context.h"
#ifdef MEGAGRAPH_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "csrc/ops/kernels.h"
#endif

namespace megagraph {
namespace {

using Keys = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

void check_shared(const at::Tensor& cu_seqlens_padded, const c10::SymInt& total_tokens,
                  int64_t cp_size, int64_t multiple, const char* op) {
  check_cu_seqlens(cu_seqlens_padded, op);
  TORCH_CHECK_VALUE(cp_size > 1, op, ": expected several ranks, got cp_size ", cp_size);
  TORCH_CHECK_VALUE(total_tokens % multiple == 0, op, ": total_tokens ", total_tokens,
                    " is not a multiple of ", multiple, " at cp_size ", cp_size);
  TORCH_CHECK_VALUE(total_tokens >= 0 && total_tokens <= std::numeric_limits<int32_t>::max() / 2,
                    op, ": total_tokens ", total_tokens, " does not fit int32 with its keys");
}

at::Tensor thd_gathered_rows_meta(const at::Tensor& cu_seqlens_padded, c10::SymInt total_tokens,
                                  int64_t cp_size) {
  check_context_parallel(cp_size, 0, "thd_gathered_rows");
  check_shared(cu_seqlens_padded, total_tokens, cp_size, cp_size, "thd_gathered_rows");
  return at::empty_symint({2, total_tokens}, cu_seqlens_padded.options());
}

Keys thd_context_keys_meta(const at::Tensor& cu_seqlens_padded, c10::SymInt total_tokens,
                           int64_t cp_size, int64_t cp_rank) {
  check_context_parallel(cp_size, cp_rank, "thd_context_keys");
  check_shared(cu_seqlens_padded, total_tokens, cp_size, 2 * cp_size, "thd_context_keys");
  const auto options = cu_seqlens_padded.options();
  const c10::SymInt offsets = 2 * cu_seqlens_padded.sym_size(0) - 1;
  return {at::empty_symint({offsets}, options), at::empty_symint({offsets}, options),
          at::empty_symint({total_tokens / (2 * cp_size) * (2 * cp_size + 1)}, options),
          at::empty_symint({2, total_tokens}, options)};
}

at::Tensor thd_gathered_rows_cpu(const at::Tensor& cu_seqlens_padded, int64_t total_tokens,
                                 int64_t cp_size) {
  at::Tensor out = thd_gathered_rows_meta(cu_seqlens_padded, total_tokens, cp_size);
  check_offset_values(cu_seqlens_padded, total_tokens, length_multiple(cp_size),
                      "thd_gathered_rows");
  const int32_t* cu = cu_seqlens_padded.const_data_ptr<int32_t>();
  const auto num_seqs = static_cast<int32_t>(cu_seqlens_padded.numel() - 1);
  const auto total = static_cast<int32_t>(total_tokens), size = static_cast<int32_t>(cp_size);
  int32_t* data = out.mutable_data_ptr<int32_t>();
  for (int32_t row = 0; row < total; ++row) {
    data[row] = gathered_row(cu, num_seqs, row, total, size);
    data[total + row] = physical_row_of_gathered(cu, num_seqs, row, total, size);
  }
  return out;
}

Keys thd_context_keys_cpu(const at::Tensor& cu_seqlens_padded, int64_t total_tokens,
                          int64_t cp_size, int64_t cp_rank) {
  Keys out = thd_context_keys_meta(cu_seqlens_padded, total_tokens, cp_size, cp_rank);
  check_offset_values(cu_seqlens_padded, total_tokens, 2 * cp_size, "thd_context_keys");
  const auto& [queries, seen, keys, places] = out;
  const int32_t* cu = cu_seqlens_padded.const_data_ptr<int32_t>();
  const auto num_seqs = static_cast<int32_t>(cu_seqlens_padded.numel() - 1);
  const auto total = static_cast<int32_t>(total_tokens), size = static_cast<int32_t>(cp_size);
  const auto rank = static_cast<int32_t>(cp_rank), none = static_cast<int32_t>(keys.numel());
  for (int32_t half = 0; half < queries.numel(); ++half) {
    const ContextOffsets at = context_offsets(cu, half, size, rank);
    queries.mutable_data_ptr<int32_t>()[half] = at.queries;
    seen.mutable_data_ptr<int32_t>()[half] = at.keys;
  }
  for (int32_t key = 0; key < none; ++key) {
    keys.mutable_data_ptr<int32_t>()[key] =
        gathered_row_of_key(cu, num_seqs, key, total, size, rank);
  }
  int32_t* place = places.mutable_data_ptr<int32_t>();
  for (int32_t row = 0; row < total; ++row) {
    const KeyPlaces found = places_of_gathered_row(cu, num_seqs, row, total, size, rank, none);
    place[row] = found.first;
    place[total + row] = found.second;
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CPU, m) {
  m.impl("thd_gathered_rows", thd_gathered_rows_cpu);
  m.impl("thd_context_keys", thd_context_keys_cpu);
}
TORCH_LIBRARY_IMPL(megagraph, Meta, m) {
  m.impl("thd_gathered_rows", thd_gathered_rows_meta);
  m.impl("thd_context_keys", thd_context_keys_meta);
}

#ifdef MEGAGRAPH_WITH_CUDA
namespace {

// Offsets stay on the device, so their values are not checked here: a document whose length is no
// multiple of 2 * cp_size gives undefined rows.
at::Tensor thd_gathered_rows_cuda(const at::Tensor& cu_seqlens_padded, int64_t total_tokens,
                                  int64_t cp_size) {
  const c10::cuda::CUDAGuard guard(cu_seqlens_padded.device());
  at::Tensor out = thd_gathered_rows_meta(cu_seqlens_padded, total_tokens, cp_size);
  gathered_rows(cu_seqlens_padded.const_data_ptr<int32_t>(),
                static_cast<int32_t>(cu_seqlens_padded.numel() - 1),
                out.mutable_data_ptr<int32_t>(), static_cast<int32_t>(total_tokens),
                static_cast<int32_t>(cp_size), c10::cuda::getCurrentCUDAStream());
  return out;
}

Keys thd_context_keys_cuda(const at::Tensor& cu_seqlens_padded, int64_t total_tokens,
                           int64_t cp_size, int64_t cp_rank) {
  const c10::cuda::CUDAGuard guard(cu_seqlens_padded.device());
  Keys out = thd_context_keys_meta(cu_seqlens_padded, total_tokens, cp_size, cp_rank);
  const auto& [queries, seen, keys, places] = out;
  ContextKeys maps{};
  maps.cu_seqlens = cu_seqlens_padded.const_data_ptr<int32_t>();
  maps.queries = queries.mutable_data_ptr<int32_t>();
  maps.seen = seen.mutable_data_ptr<int32_t>();
  maps.keys = keys.mutable_data_ptr<int32_t>();
  maps.places = places.mutable_data_ptr<int32_t>();
  maps.num_seqs = static_cast<int32_t>(cu_seqlens_padded.numel() - 1);
  maps.num_keys = static_cast<int32_t>(keys.numel());
  maps.total_tokens = static_cast<int32_t>(total_tokens);
  maps.cp_size = static_cast<int32_t>(cp_size);
  maps.cp_rank = static_cast<int32_t>(cp_rank);
  context_keys(maps, c10::cuda::getCurrentCUDAStream());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CUDA, m) {
  m.impl("thd_gathered_rows", thd_gathered_rows_cuda);
  m.impl("thd_context_keys", thd_context_keys_cuda);
}
#endif

}  // namespace megagraph
