// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding over packed documents. Positions restart at 0 in each document. The
// whole physical buffer is defined: tail rows are zero in the output and in the gradient,
// dimensions past the rotary part pass through.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "csrc/ops/checks.h"
#include "csrc/ops/rope_rotation.h"
#include "csrc/ops/thd_positions.h"
#ifdef MEGAGRAPH_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "csrc/ops/kernels.h"
#endif

namespace megagraph {
namespace {

constexpr size_t kMaxTensors = 4;

RopeLayout rope_layout(bool interleaved, bool mla_interleaved) {
  if (interleaved) return RopeLayout::kInterleaved;
  return mla_interleaved ? RopeLayout::kMla : RopeLayout::kNeox;
}

void check_rope_thd(at::TensorList tensors, const at::Tensor& cos, const at::Tensor& sin,
                    const at::Tensor& cu_seqlens_padded, bool interleaved, bool mla_interleaved,
                    int64_t cp_size, int64_t cp_rank) {
  const char* op = "rope_thd";
  check_cu_seqlens(cu_seqlens_padded, op);
  check_context_parallel(cp_size, cp_rank, op);
  TORCH_CHECK_VALUE(!tensors.empty() && tensors.size() <= kMaxTensors, op, ": between 1 and ",
                    kMaxTensors, " tensors a call, got ", tensors.size());
  TORCH_CHECK_VALUE(!(interleaved && mla_interleaved), op,
                    ": interleaved and mla_interleaved exclude each other");
  TORCH_CHECK_VALUE(cos.dim() == 2 && sin.sym_sizes() == cos.sym_sizes(), op,
                    ": cos and sin must both be [positions, rotary_dim], got ", cos.sym_sizes(),
                    " and ", sin.sym_sizes());
  TORCH_CHECK_VALUE(cos.is_contiguous() && sin.is_contiguous(), op,
                    ": cos and sin must be contiguous");
  rope_scalar_of(cos.scalar_type(), op);
  TORCH_CHECK_VALUE(cos.sym_size(1) % 2 == 0, op, ": rotary_dim must be even, got ",
                    cos.sym_size(1));
  for (const at::Tensor& t : tensors) {
    TORCH_CHECK_VALUE(t.dim() == 3, op, ": expected [tokens, heads, head_dim], got shape ",
                      t.sym_sizes());
    TORCH_CHECK_VALUE(t.sym_size(0) == tensors[0].sym_size(0), op,
                      ": all tensors need the same number of tokens, got ", t.sym_size(0), " and ",
                      tensors[0].sym_size(0));
    TORCH_CHECK_VALUE(cos.sym_size(1) <= t.sym_size(2), op, ": rotary_dim ", cos.sym_size(1),
                      " is larger than head_dim ", t.sym_size(2));
    TORCH_CHECK_VALUE(cos.scalar_type() == t.scalar_type() && sin.scalar_type() == t.scalar_type(),
                      op, ": cos and sin must have the tensors' dtype ", t.scalar_type(), ", got ",
                      cos.scalar_type(), " and ", sin.scalar_type());
    check_same_device(t, cos, op);
    check_same_device(t, sin, op);
    check_same_device(t, cu_seqlens_padded, op);
  }
}

std::vector<at::Tensor> rope_thd_meta(at::TensorList tensors, const at::Tensor& cos,
                                      const at::Tensor& sin, const at::Tensor& cu_seqlens_padded,
                                      bool interleaved, bool mla_interleaved, int64_t cp_size,
                                      int64_t cp_rank) {
  check_rope_thd(tensors, cos, sin, cu_seqlens_padded, interleaved, mla_interleaved, cp_size,
                 cp_rank);
  std::vector<at::Tensor> out;
  out.reserve(tensors.size());
  for (const at::Tensor& t : tensors) {
    out.push_back(at::empty_symint(t.sym_sizes(), t.options()));
  }
  return out;
}

// One row of one head. in0/in1 and out0/out1 follow RopeLayout; the backward direction swaps roles.
template <typename scalar_t, bool backward>
void rotate_head(const scalar_t* in, scalar_t* out, const scalar_t* cos, const scalar_t* sin,
                 int64_t half, RopeLayout layout) {
  for (int64_t i = 0; i < half; ++i) {
    const int64_t split[2] = {i, half + i}, adjacent[2] = {2 * i, 2 * i + 1};
    const int64_t* rotated = layout == RopeLayout::kInterleaved ? adjacent : split;
    const int64_t* source = layout == RopeLayout::kNeox ? split : adjacent;
    const int64_t* from = backward ? rotated : source;
    const int64_t* to = backward ? source : rotated;
    const RopePair<scalar_t> x{in[from[0]], in[from[1]]};
    const RopePair<scalar_t> c{cos[rotated[0]], cos[rotated[1]]};
    const RopePair<scalar_t> s{sin[rotated[0]], sin[rotated[1]]};
    const RopePair<scalar_t> y = backward ? rotate_pair_back<RopeRounding::kEach>(x, c, s)
                                          : rotate_pair<RopeRounding::kEach>(x, c, s);
    out[to[0]] = y.first;
    out[to[1]] = y.second;
  }
}

template <bool backward>
std::vector<at::Tensor> rope_thd_cpu(at::TensorList tensors, const at::Tensor& cos,
                                     const at::Tensor& sin, const at::Tensor& cu_seqlens_padded,
                                     bool interleaved, bool mla_interleaved, int64_t cp_size,
                                     int64_t cp_rank) {
  std::vector<at::Tensor> result = rope_thd_meta(tensors, cos, sin, cu_seqlens_padded, interleaved,
                                                 mla_interleaved, cp_size, cp_rank);
  check_offset_values(cu_seqlens_padded, tensors[0].size(0) * cp_size, length_multiple(cp_size),
                      "rope_thd");
  const int32_t* cu = cu_seqlens_padded.const_data_ptr<int32_t>();
  const auto num_seqs = static_cast<int32_t>(cu_seqlens_padded.numel()) - 1;
  const int64_t rotary_dim = cos.size(1);
  const RopeLayout layout = rope_layout(interleaved, mla_interleaved);
  for (size_t n = 0; n < tensors.size(); ++n) {
    const at::Tensor t = tensors[n].contiguous();
    const int64_t heads = t.size(1), dim = t.size(2);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, t.scalar_type(), "rope_thd", [&] {
      const auto* in = t.const_data_ptr<scalar_t>();
      auto* out = result[n].mutable_data_ptr<scalar_t>();
      at::parallel_for(0, t.size(0), 64, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int32_t position =
              document_position(cu, num_seqs, static_cast<int32_t>(row),
                                static_cast<int32_t>(cp_size), static_cast<int32_t>(cp_rank));
          TORCH_CHECK_INDEX(position < cos.size(0), "rope_thd: row ", row, " has position ",
                            position, ", past the ", cos.size(0), " positions of the tables");
          for (int64_t head = 0; head < heads; ++head) {
            const int64_t at = (row * heads + head) * dim;
            if (position < 0) {
              std::fill_n(out + at, dim, scalar_t(0));
              continue;
            }
            rotate_head<scalar_t, backward>(
                in + at, out + at, cos.const_data_ptr<scalar_t>() + position * rotary_dim,
                sin.const_data_ptr<scalar_t>() + position * rotary_dim, rotary_dim / 2, layout);
            std::copy_n(in + at + rotary_dim, dim - rotary_dim, out + at + rotary_dim);
          }
        }
      });
    });
  }
  return result;
}

using RopeSignature = std::vector<at::Tensor>(at::TensorList, const at::Tensor&, const at::Tensor&,
                                              const at::Tensor&, bool, bool, int64_t, int64_t);

std::vector<at::Tensor> call_rope(const char* name, at::TensorList tensors, const at::Tensor& cos,
                                  const at::Tensor& sin, const at::Tensor& cu_seqlens_padded,
                                  bool interleaved, bool mla_interleaved, int64_t cp_size,
                                  int64_t cp_rank) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<RopeSignature>().call(
      tensors, cos, sin, cu_seqlens_padded, interleaved, mla_interleaved, cp_size, cp_rank);
}

class RopeThd : public torch::autograd::Function<RopeThd> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                at::TensorList tensors, const at::Tensor& cos,
                                                const at::Tensor& sin,
                                                const at::Tensor& cu_seqlens_padded,
                                                bool interleaved, bool mla_interleaved,
                                                int64_t cp_size, int64_t cp_rank) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({cos, sin, cu_seqlens_padded});
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["mla_interleaved"] = mla_interleaved;
    ctx->saved_data["cp_size"] = cp_size;
    ctx->saved_data["cp_rank"] = cp_rank;
    return call_rope("megagraph::rope_thd", tensors, cos, sin, cu_seqlens_padded, interleaved,
                     mla_interleaved, cp_size, cp_rank);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    torch::autograd::variable_list result = call_rope(
        "megagraph::rope_thd_backward", grads, saved[0], saved[1], saved[2],
        ctx->saved_data["interleaved"].toBool(), ctx->saved_data["mla_interleaved"].toBool(),
        ctx->saved_data["cp_size"].toInt(), ctx->saved_data["cp_rank"].toInt());
    result.resize(grads.size() + 7);  // cos, sin, offsets and the four options have no gradient
    return result;
  }
};

std::vector<at::Tensor> rope_thd_autograd(at::TensorList tensors, const at::Tensor& cos,
                                          const at::Tensor& sin,
                                          const at::Tensor& cu_seqlens_padded, bool interleaved,
                                          bool mla_interleaved, int64_t cp_size, int64_t cp_rank) {
  check_given(cos, "cos", "rope_thd");
  check_given(sin, "sin", "rope_thd");
  check_given(cu_seqlens_padded, "cu_seqlens_padded", "rope_thd");
  return RopeThd::apply(tensors, cos, sin, cu_seqlens_padded, interleaved, mla_interleaved, cp_size,
                        cp_rank);
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CPU, m) {
  m.impl("rope_thd", rope_thd_cpu<false>);
  m.impl("rope_thd_backward", rope_thd_cpu<true>);
}
TORCH_LIBRARY_IMPL(megagraph, Meta, m) {
  m.impl("rope_thd", rope_thd_meta);
  m.impl("rope_thd_backward", rope_thd_meta);
}
TORCH_LIBRARY_IMPL(megagraph, Autograd, m) {
  m.impl("rope_thd", rope_thd_autograd);
  // A second derivative is an error, not a silent zero.
  m.impl("rope_thd_backward", torch::autograd::autogradNotImplementedFallback());
}

#ifdef MEGAGRAPH_WITH_CUDA
namespace {

static_assert(kMaxTensors == kMaxRopeTensors);

template <bool backward>
std::vector<at::Tensor> rope_thd_cuda(at::TensorList tensors, const at::Tensor& cos,
                                      const at::Tensor& sin, const at::Tensor& cu_seqlens_padded,
                                      bool interleaved, bool mla_interleaved, int64_t cp_size,
                                      int64_t cp_rank) {
  check_rope_thd(tensors, cos, sin, cu_seqlens_padded, interleaved, mla_interleaved, cp_size,
                 cp_rank);
  const c10::cuda::CUDAGuard guard(cos.device());
  RopeArgs args{};
  args.cos = cos.const_data_ptr();
  args.sin = sin.const_data_ptr();
  args.cu_seqlens = cu_seqlens_padded.const_data_ptr<int32_t>();
  args.num_tensors = static_cast<int32_t>(tensors.size());
  args.tokens = static_cast<int32_t>(tensors[0].size(0));
  args.num_seqs = static_cast<int32_t>(cu_seqlens_padded.numel()) - 1;
  args.positions = static_cast<int32_t>(cos.size(0));
  args.rotary_dim = static_cast<int32_t>(cos.size(1));
  args.cp_size = static_cast<int32_t>(cp_size);
  args.cp_rank = static_cast<int32_t>(cp_rank);
  std::vector<at::Tensor> inputs, result;
  for (size_t n = 0; n < tensors.size(); ++n) {
    inputs.push_back(tensors[n].stride(2) == 1 ? tensors[n] : tensors[n].contiguous());
    const at::Tensor& t = inputs.back();
    result.push_back(at::empty(t.sizes(), t.options()));
    args.in[n] = t.const_data_ptr();
    args.out[n] = result.back().mutable_data_ptr();
    args.in_token_stride[n] = t.stride(0);
    args.in_head_stride[n] = t.stride(1);
    args.first_head[n + 1] = args.first_head[n] + static_cast<int32_t>(t.size(1));
    args.dim[n] = static_cast<int32_t>(t.size(2));
  }
  rope_thd(args, rope_scalar_of(cos.scalar_type(), "rope_thd"),
           rope_layout(interleaved, mla_interleaved), backward, c10::cuda::getCurrentCUDAStream());
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CUDA, m) {
  m.impl("rope_thd", rope_thd_cuda<false>);
  m.impl("rope_thd_backward", rope_thd_cuda<true>);
}
#endif

}  // namespace megagraph
