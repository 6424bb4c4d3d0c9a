// SPDX-License-Identifier: Apache-2.0
// Attention inside each document of a pack. Tail rows are zero in the output and in all three
// gradients, whatever q, k, v and the incoming gradient hold there.
//
// Offsets are the *physical* ones. Under the causal mask, finite padding at a document's end
// changes no valid row. Queries and keys may have offsets of their own, of as many documents: the
// last query of a document then sees all of its keys, and one before it a key less. No document may
// be longer than max_seqlen: the CPU side refuses one, on a GPU its further rows are undefined,
// since the offsets stay on the device.
//
// The CPU side is a plain reference (csrc/ops/varlen_attention_cpu.cpp). The CUDA side runs ATen's
// FlashAttention, which leaves every row past the last offset unwritten, in the output and in the
// gradients; the tail is zeroed here. softmax_lse stays undefined there: only the backward pass
// reads it, and not in the tail. The backward pass adds with atomics unless
// torch.use_deterministic_algorithms(True) is set.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>

#include "csrc/ops/checks.h"
#include "csrc/ops/varlen_attention.h"
#ifdef MEGAGRAPH_WITH_CUDA
#include "csrc/ops/document_grids.h"
#endif

namespace megagraph {

void check_varlen_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                            c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k) {
  const char* op = "varlen_attention";
  check_cu_seqlens(cu_seqlens_q, op);
  check_cu_seqlens(cu_seqlens_k, op);
  TORCH_CHECK_VALUE(cu_seqlens_q.sym_size(0) == cu_seqlens_k.sym_size(0), op,
                    ": expected offsets of as many documents for queries and keys, got ",
                    cu_seqlens_q.sym_size(0) - 1, " and ", cu_seqlens_k.sym_size(0) - 1);
  for (const at::Tensor& t : {q, k, v}) {
    TORCH_CHECK_VALUE(t.dim() == 3, op, ": expected [tokens, heads, head_dim], got shape ",
                      t.sym_sizes());
    TORCH_CHECK_VALUE(t.scalar_type() == q.scalar_type(), op, ": q, k and v need one dtype, got ",
                      q.scalar_type(), " and ", t.scalar_type());
    TORCH_CHECK_VALUE(t.sym_size(2) == q.sym_size(2), op, ": q, k and v need one head_dim, got ",
                      q.sym_size(2), ", ", k.sym_size(2), " and ", v.sym_size(2));
    check_same_device(t, cu_seqlens_q, op);
  }
  TORCH_CHECK_VALUE(at::isFloatingType(q.scalar_type()) && q.element_size() > 1, op,
                    ": expected a floating dtype of 16 bits or more, got ", q.scalar_type());
  check_same_device(cu_seqlens_k, cu_seqlens_q, op);
  TORCH_CHECK_VALUE(k.sym_size(0) == v.sym_size(0) &&
                        (!cu_seqlens_q.is_same(cu_seqlens_k) || q.sym_size(0) == k.sym_size(0)),
                    op, ": q, k and v need the same number of tokens, got ", q.sym_size(0), ", ",
                    k.sym_size(0), " and ", v.sym_size(0));
  TORCH_CHECK_VALUE(k.sym_size(1) == v.sym_size(1), op, ": k and v need as many heads, got ",
                    k.sym_size(1), " and ", v.sym_size(1));
  TORCH_CHECK_VALUE(k.sym_size(1) > 0 && q.sym_size(1) % k.sym_size(1) == 0, op, ": ",
                    q.sym_size(1), " query heads are no multiple of ", k.sym_size(1), " key heads");
  for (const c10::SymInt& longest : {max_seqlen_q, max_seqlen_k}) {
    TORCH_CHECK_VALUE(longest >= 0, op, ": max_seqlen must not be negative, got ", longest);
  }
}

double softmax_scale_or_default(const at::Tensor& q, std::optional<double> softmax_scale) {
  return softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(2))));
}

std::tuple<at::Tensor, at::Tensor> varlen_attention_meta(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k,
    std::optional<double>, bool) {
  check_varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
  // Float32 as FlashAttention's; float64 stays float64.
  const auto lse_type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint({q.sym_size(1), q.sym_size(0)}, q.options().dtype(lse_type))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> varlen_attention_backward_meta(
    const at::Tensor&, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt,
    c10::SymInt, std::optional<double>, bool) {
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint(k.sym_sizes(), k.options()),
          at::empty_symint(v.sym_sizes(), v.options())};
}

namespace {

class VarlenAttention : public torch::autograd::Function<VarlenAttention> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v, const at::Tensor& cu_seqlens_q,
                                                const at::Tensor& cu_seqlens_k,
                                                c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k,
                                                std::optional<double> softmax_scale, bool causal) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("megagraph::varlen_attention", "")
            .typed<std::tuple<at::Tensor, at::Tensor>(
                const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                const at::Tensor&, c10::SymInt, c10::SymInt, std::optional<double>, bool)>();
    auto [out, lse] = op.call(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                              softmax_scale, causal);
    ctx->save_for_backward({q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k});
    ctx->saved_data["max_seqlen_q"] = max_seqlen_q;
    ctx->saved_data["max_seqlen_k"] = max_seqlen_k;
    ctx->saved_data["softmax_scale"] = softmax_scale;
    ctx->saved_data["causal"] = causal;
    ctx->mark_non_differentiable({lse});
    return {out, lse};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("megagraph::varlen_attention_backward", "")
            .typed<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
                const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                c10::SymInt, c10::SymInt, std::optional<double>, bool)>();
    auto [dq, dk, dv] = op.call(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4],
                                saved[5], saved[6], ctx->saved_data["max_seqlen_q"].toSymInt(),
                                ctx->saved_data["max_seqlen_k"].toSymInt(),
                                ctx->saved_data["softmax_scale"].to<std::optional<double>>(),
                                ctx->saved_data["causal"].toBool());
    at::Tensor none;
    return {dq, dk, dv, none, none, none, none, none, none};
  }
};

std::tuple<at::Tensor, at::Tensor> varlen_attention_autograd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k,
    std::optional<double> softmax_scale, bool causal) {
  check_given(q, "q", "varlen_attention");
  check_given(k, "k", "varlen_attention");
  check_given(v, "v", "varlen_attention");
  check_given(cu_seqlens_q, "cu_seqlens of queries", "varlen_attention");
  check_given(cu_seqlens_k, "cu_seqlens of keys", "varlen_attention");
  auto result = VarlenAttention::apply(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                       max_seqlen_k, softmax_scale, causal);
  return {result[0], result[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, Meta, m) {
  m.impl("varlen_attention", varlen_attention_meta);
  m.impl("varlen_attention_backward", varlen_attention_backward_meta);
}
TORCH_LIBRARY_IMPL(megagraph, Autograd, m) {
  m.impl("varlen_attention", varlen_attention_autograd);
  // A second derivative is an error, not a silent zero.
  m.impl("varlen_attention_backward", torch::autograd::autogradNotImplementedFallback());
}

#ifdef MEGAGRAPH_WITH_CUDA
namespace {

void check_flash(const at::Tensor& q) {
  TORCH_CHECK_VALUE(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16,
                    "varlen_attention: on a GPU q, k and v must be float16 or bfloat16, got ",
                    q.scalar_type());
  TORCH_CHECK_VALUE(q.size(2) % 8 == 0 && q.size(2) <= 256,
                    "varlen_attention: on a GPU head_dim must be a multiple of 8, at most 256, "
                    "got ",
                    q.size(2));
}

void zero_tails_of(at::TensorList tensors, const at::Tensor& cu_seqlens) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("megagraph::zero_tail_", "")
                             .typed<void(at::TensorList, const at::Tensor&)>();
  op.call(tensors, cu_seqlens);
}

// FlashAttention reads 16 bytes at a time, and its outputs take over the order of an input's
// dimensions: a view is read in place if its rows are aligned and tokens come first.
at::Tensor token_major(const at::Tensor& t) {
  const bool ordered =
      t.stride(2) == 1 && t.stride(1) >= t.size(2) && t.stride(0) >= t.stride(1) * t.size(1);
  const bool aligned = t.stride(0) % 8 == 0 && t.stride(1) % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  return ordered && aligned ? t : t.contiguous();
}

// FlashAttention refuses an empty launch.
bool has_no_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cu_seqlens,
                 int64_t max_seqlen_q, int64_t max_seqlen_k) {
  return q.numel() == 0 || k.numel() == 0 || cu_seqlens.numel() == 1 || max_seqlen_q == 0 ||
         max_seqlen_k == 0;
}

bool are_shared(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k) {
  return cu_seqlens_q.const_data_ptr() == cu_seqlens_k.const_data_ptr();
}

// What stages a micro-batch sets the grids of kernels over its own offsets. Offsets of keys alone
// are made of those by an op, and grids over them stay as captured.
void launch_attention(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                      int64_t max_seqlen, const std::function<void()>& launch) {
  if (are_shared(cu_seqlens_q, cu_seqlens_k))
    return launch_over_documents(cu_seqlens_q, max_seqlen, launch);
  launch();
}

std::tuple<at::Tensor, at::Tensor> varlen_attention_cuda(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> softmax_scale, bool causal) {
  check_varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
  check_flash(q);
  if (has_no_rows(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)) {
    return {at::zeros(q.sizes(), q.options()),
            at::zeros({q.size(1), q.size(0)}, q.options().dtype(at::kFloat))};
  }
  // For documents of one row and grouped queries, FlashAttention takes a path for decoding, which
  // wants as many rows as there are documents: a tail, or an empty document, is refused there.
  const int64_t longest = std::max<int64_t>(max_seqlen_q, 2);
  const int64_t longest_k = std::max<int64_t>(max_seqlen_k, 2);
  at::Tensor out, lse;
  launch_attention(cu_seqlens_q, cu_seqlens_k, longest, [&] {
    std::tie(out, lse, std::ignore, std::ignore, std::ignore) = at::_flash_attention_forward(
        token_major(q), token_major(k), token_major(v), cu_seqlens_q, cu_seqlens_k, longest,
        longest_k, /*dropout_p=*/0.0, causal, /*return_debug_mask=*/false,
        softmax_scale_or_default(q, softmax_scale));
  });
  zero_tails_of({out}, cu_seqlens_q);
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> varlen_attention_backward_cuda(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> softmax_scale, bool causal) {
  if (has_no_rows(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)) {
    return {at::zeros(q.sizes(), q.options()), at::zeros(k.sizes(), k.options()),
            at::zeros(v.sizes(), v.options())};
  }
  // Read only if there is dropout.
  const at::Tensor no_rng = at::empty({0}, q.options().dtype(at::kLong));
  at::Tensor dq, dk, dv;
  launch_attention(cu_seqlens_q, cu_seqlens_k, max_seqlen_k, [&] {
    std::tie(dq, dk, dv) = at::_flash_attention_backward(
        token_major(grad), token_major(q), token_major(k), token_major(v), out, lse, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, /*dropout_p=*/0.0, causal, no_rng, no_rng,
        softmax_scale_or_default(q, softmax_scale));
  });
  if (are_shared(cu_seqlens_q, cu_seqlens_k)) {
    zero_tails_of({dq, dk, dv}, cu_seqlens_q);
  } else {
    zero_tails_of({dq}, cu_seqlens_q);
    zero_tails_of({dk, dv}, cu_seqlens_k);
  }
  return {dq, dk, dv};
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CUDA, m) {
  m.impl("varlen_attention", varlen_attention_cuda);
  m.impl("varlen_attention_backward", varlen_attention_backward_cuda);
}
#endif

}  // namespace megagraph
