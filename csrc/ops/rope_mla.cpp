// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of multi-latent attention over packed documents: the last dimensions of
// each query in place, and keys and values from the up-projection and the one rotary key that all
// heads share. Positions restart at 0 in each document. Members of a pair lie side by side in the
// input, half a rotary part apart in the output. The whole physical buffer is defined: rows of the
// tail are zero, rotary part or not, in every result and in every gradient.
//
// Neither op has a derivative of its own: packs/ops.py joins the two.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include "csrc/ops/checks.h"
#include "csrc/ops/rope_mla_tensors.h"
#include "csrc/ops/rope_rotation.h"
#include "csrc/ops/thd_positions.h"
#include "csrc/torch/version_counter.h"
#ifdef MEGAGRAPH_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "csrc/ops/kernels.h"
#endif

namespace megagraph {
namespace {

// -- CPU -----------------------------------------------------------------------------------------

// One row of one head, from adjacent members to split ones, or back. `in` may be `out`.
template <typename scalar_t, bool backward>
void rotate_row(const scalar_t* in, scalar_t* out, const scalar_t* cos, const scalar_t* sin,
                int64_t half) {
  std::array<scalar_t, kMaxRopeMlaDim> x;
  std::copy_n(in, 2 * half, x.begin());
  for (int64_t i = 0; i < half; ++i) {
    const RopePair<scalar_t> c{cos[i], cos[half + i]}, s{sin[i], sin[half + i]};
    if constexpr (backward) {
      const auto y =
          rotate_pair_back<RopeRounding::kFused>(RopePair<scalar_t>{x[i], x[half + i]}, c, s);
      out[2 * i] = y.first;
      out[2 * i + 1] = y.second;
    } else {
      const auto y =
          rotate_pair<RopeRounding::kFused>(RopePair<scalar_t>{x[2 * i], x[2 * i + 1]}, c, s);
      out[i] = y.first;
      out[half + i] = y.second;
    }
  }
}

template <typename scalar_t>
scalar_t* row_of(const at::Tensor& t, int64_t row, int64_t head) {
  return static_cast<scalar_t*>(t.data_ptr()) + row * t.stride(0) + head * t.stride(1);
}

template <typename scalar_t>
void zero_row(const at::Tensor& t, int64_t row) {
  for (int64_t head = 0; t.defined() && head < t.size(1); ++head) {
    std::fill_n(row_of<scalar_t>(t, row, head), t.size(2), scalar_t(0));
  }
}

template <typename scalar_t, bool backward>
void rope_mla_row(const RopeMlaTensors& all, int64_t row, int32_t position) {
  if (position < 0) {
    zero_row<scalar_t>(all.q_out, row);
    for (const at::Tensor& t : all.results(backward)) zero_row<scalar_t>(t, row);
    return;
  }
  const int64_t rotary_dim = all.cos.size(1), half = rotary_dim / 2;
  const auto* cos = all.cos.const_data_ptr<scalar_t>() + position * rotary_dim;
  const auto* sin = all.sin.const_data_ptr<scalar_t>() + position * rotary_dim;
  for (int64_t head = 0; all.q.defined() && head < all.q.size(1); ++head) {
    const int64_t content = all.q.size(2) - rotary_dim;
    const auto* in = row_of<scalar_t>(all.q, row, head);
    auto* out = row_of<scalar_t>(all.q_out, row, head);
    if (backward) std::copy_n(in, content, out);
    rotate_row<scalar_t, backward>(in + content, out + content, cos, sin, half);
  }
  if (!all.kv.defined()) return;
  const int64_t heads = all.kv.size(1), v_dim = all.v.size(2);
  const int64_t content = all.k.size(2) - rotary_dim;
  using sum_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
  std::array<sum_t, kMaxRopeMlaDim> sum{};
  std::array<scalar_t, kMaxRopeMlaDim> rotary;
  auto* k_pe = row_of<scalar_t>(all.k_pe, row, 0);
  if (!backward) rotate_row<scalar_t, false>(k_pe, rotary.data(), cos, sin, half);
  for (int64_t head = 0; head < heads; ++head) {
    auto* kv = row_of<scalar_t>(all.kv, row, head);
    auto* k = row_of<scalar_t>(all.k, row, head);
    auto* v = row_of<scalar_t>(all.v, row, head);
    if constexpr (backward) {
      std::copy_n(k, content, kv);
      std::copy_n(v, v_dim, kv + content);
      for (int64_t d = 0; d < rotary_dim; ++d) sum[d] += static_cast<sum_t>(k[content + d]);
    } else {
      std::copy_n(kv, content, k);
      std::copy_n(kv + content, v_dim, v);
      std::copy_n(rotary.begin(), rotary_dim, k + content);
    }
  }
  if constexpr (backward) {
    for (int64_t d = 0; d < rotary_dim; ++d) rotary[d] = static_cast<scalar_t>(sum[d]);
    rotate_row<scalar_t, true>(rotary.data(), k_pe, cos, sin, half);
  }
}

template <bool backward>
std::vector<at::Tensor> run_cpu(const RopeMlaTensors& all) {
  check_offset_values(all.cu_seqlens, all.tokens() * all.cp_size, length_multiple(all.cp_size),
                      kRopeMla);
  const int32_t* cu = all.cu_seqlens.const_data_ptr<int32_t>();
  const auto num_seqs = static_cast<int32_t>(all.cu_seqlens.numel()) - 1;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, all.cos.scalar_type(), kRopeMla, [&] {
    at::parallel_for(0, all.tokens(), 64, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int32_t position =
            document_position(cu, num_seqs, static_cast<int32_t>(row),
                              static_cast<int32_t>(all.cp_size), static_cast<int32_t>(all.cp_rank));
        TORCH_CHECK_INDEX(position < all.cos.size(0), kRopeMla, ": row ", row, " has position ",
                          position, ", past the ", all.cos.size(0), " positions of the tables");
        rope_mla_row<scalar_t, backward>(all, row, position);
      }
    });
  });
  return all.results(backward);
}

// -- CUDA ----------------------------------------------------------------------------------------

#ifdef MEGAGRAPH_WITH_CUDA
RopeMlaView view_of(const at::Tensor& t) {
  if (!t.defined()) return {};
  return {t.data_ptr(), t.stride(0), t.stride(1), static_cast<int32_t>(t.size(1)),
          static_cast<int32_t>(t.size(2))};
}

template <bool backward>
std::vector<at::Tensor> run_cuda(const RopeMlaTensors& all) {
  const c10::cuda::CUDAGuard guard(all.cos.device());
  RopeMlaArgs args{};
  args.q = view_of(all.q);
  args.q_out = view_of(all.q_out);
  args.kv = view_of(all.kv);
  args.k_pe = view_of(all.k_pe);
  args.k = view_of(all.k);
  args.v = view_of(all.v);
  args.cos = all.cos.const_data_ptr();
  args.sin = all.sin.const_data_ptr();
  args.cu_seqlens = all.cu_seqlens.const_data_ptr<int32_t>();
  args.tokens = static_cast<int32_t>(all.tokens());
  args.num_seqs = static_cast<int32_t>(all.cu_seqlens.numel()) - 1;
  args.positions = static_cast<int32_t>(all.cos.size(0));
  args.rotary_dim = static_cast<int32_t>(all.cos.size(1));
  args.cp_size = static_cast<int32_t>(all.cp_size);
  args.cp_rank = static_cast<int32_t>(all.cp_rank);
  rope_mla(args, rope_scalar_of(all.cos.scalar_type(), kRopeMla), backward,
           c10::cuda::getCurrentCUDAStream());
  return all.results(backward);
}
#endif

// -- ops -----------------------------------------------------------------------------------------

template <bool backward>
std::vector<at::Tensor> run_meta(const RopeMlaTensors& all) {
  return all.results(backward);
}

using Run = std::vector<at::Tensor>(const RopeMlaTensors&);

template <Run run>
std::vector<at::Tensor> rope_mla_on(const MaybeTensor& q, const MaybeTensor& kv,
                                    const MaybeTensor& k_pe, const at::Tensor& cos,
                                    const at::Tensor& sin, const at::Tensor& cu_seqlens_padded,
                                    int64_t v_dim, int64_t cp_size, int64_t cp_rank) {
  return run(rope_mla_tensors(q, kv, k_pe, cos, sin, cu_seqlens_padded, v_dim, cp_size, cp_rank));
}

template <Run run>
std::vector<at::Tensor> rope_mla_backward_on(const MaybeTensor& dq, const MaybeTensor& dk,
                                             const MaybeTensor& dv, const at::Tensor& cos,
                                             const at::Tensor& sin,
                                             const at::Tensor& cu_seqlens_padded, int64_t cp_size,
                                             int64_t cp_rank) {
  return run(rope_mla_backward_tensors(dq, dk, dv, cos, sin, cu_seqlens_padded, cp_size, cp_rank));
}

std::vector<at::Tensor> rope_mla_autograd(const MaybeTensor& q, const MaybeTensor& kv,
                                          const MaybeTensor& k_pe, const at::Tensor& cos,
                                          const at::Tensor& sin,
                                          const at::Tensor& cu_seqlens_padded, int64_t v_dim,
                                          int64_t cp_size, int64_t cp_rank) {
  for (const MaybeTensor* t : {&q, &kv, &k_pe}) {
    TORCH_CHECK(!(at::GradMode::is_enabled() && t->has_value() && (*t)->requires_grad()),
                "rope_mla_ writes in place and has no derivative: use packs.ops.rope_mla for "
                "tensors that require grad");
  }
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("megagraph::rope_mla_", "")
          .typed<std::vector<at::Tensor>(const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                                         const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                         int64_t, int64_t, int64_t)>();
  std::vector<at::Tensor> made;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    made = op.call(q, kv, k_pe, cos, sin, cu_seqlens_padded, v_dim, cp_size, cp_rank);
  }
  if (q) note_write(*q);
  return made;
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CPU, m) {
  m.impl("rope_mla_", rope_mla_on<run_cpu<false>>);
  m.impl("rope_mla_backward", rope_mla_backward_on<run_cpu<true>>);
}
TORCH_LIBRARY_IMPL(megagraph, Meta, m) {
  m.impl("rope_mla_", rope_mla_on<run_meta<false>>);
  m.impl("rope_mla_backward", rope_mla_backward_on<run_meta<true>>);
}
TORCH_LIBRARY_IMPL(megagraph, Autograd, m) {
  m.impl("rope_mla_", rope_mla_autograd);
  // A second derivative is an error, not a silent zero.
  m.impl("rope_mla_backward", torch::autograd::autogradNotImplementedFallback());
}
#ifdef MEGAGRAPH_WITH_CUDA
TORCH_LIBRARY_IMPL(megagraph, CUDA, m) {
  m.impl("rope_mla_", rope_mla_on<run_cuda<false>>);
  m.impl("rope_mla_backward", rope_mla_backward_on<run_cuda<true>>);
}
#endif

}  // namespace megagraph
