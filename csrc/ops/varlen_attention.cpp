// SPDX-License-Identifier: Apache-2.0
// Attention inside each document of a pack. Tail rows are zero in the output and in all three
// gradients, whatever q, k, v and the incoming gradient hold there.
//
// cu_seqlens are the *physical* offsets. Under the causal mask, finite padding at a document's end
// changes no valid row. No document may be longer than max_seqlen: the CPU side refuses one, on a
// GPU its further rows are undefined, since the offsets stay on the device.
//
// The CPU side is a plain reference: the whole score matrix of one document at a time. The CUDA
// side runs ATen's FlashAttention, which leaves every row past the last offset unwritten, in the
// output and in the gradients; the tail is zeroed here. softmax_lse stays undefined there: only the
// backward pass reads it, and not in the tail. The backward pass adds with atomics unless
// torch.use_deterministic_algorithms(True) is set.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "csrc/ops/checks.h"
#ifdef MEGAGRAPH_WITH_CUDA
#include "csrc/ops/document_grids.h"
#endif

namespace megagraph {
namespace {

void check_varlen_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& cu_seqlens, c10::SymInt max_seqlen) {
  const char* op = "varlen_attention";
  check_cu_seqlens(cu_seqlens, op);
  for (const at::Tensor& t : {q, k, v}) {
    TORCH_CHECK_VALUE(t.dim() == 3, op, ": expected [tokens, heads, head_dim], got shape ",
                      t.sym_sizes());
    TORCH_CHECK_VALUE(t.scalar_type() == q.scalar_type(), op, ": q, k and v need one dtype, got ",
                      q.scalar_type(), " and ", t.scalar_type());
    TORCH_CHECK_VALUE(t.sym_size(0) == q.sym_size(0), op,
                      ": q, k and v need the same number of tokens, got ", q.sym_size(0), ", ",
                      k.sym_size(0), " and ", v.sym_size(0));
    TORCH_CHECK_VALUE(t.sym_size(2) == q.sym_size(2), op, ": q, k and v need one head_dim, got ",
                      q.sym_size(2), ", ", k.sym_size(2), " and ", v.sym_size(2));
    check_same_device(t, cu_seqlens, op);
  }
  TORCH_CHECK_VALUE(k.sym_size(1) == v.sym_size(1), op, ": k and v need as many heads, got ",
                    k.sym_size(1), " and ", v.sym_size(1));
  TORCH_CHECK_VALUE(k.sym_size(1) > 0 && q.sym_size(1) % k.sym_size(1) == 0, op, ": ",
                    q.sym_size(1), " query heads are no multiple of ", k.sym_size(1), " key heads");
  TORCH_CHECK_VALUE(max_seqlen >= 0, op, ": max_seqlen must not be negative, got ", max_seqlen);
}

double softmax_scale_or_default(const at::Tensor& q, std::optional<double> softmax_scale) {
  return softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(2))));
}

std::tuple<at::Tensor, at::Tensor> varlen_attention_meta(const at::Tensor& q, const at::Tensor& k,
                                                         const at::Tensor& v,
                                                         const at::Tensor& cu_seqlens,
                                                         c10::SymInt max_seqlen,
                                                         std::optional<double>, bool) {
  check_varlen_attention(q, k, v, cu_seqlens, max_seqlen);
  // Float32 as FlashAttention's; float64 stays float64.
  const auto lse_type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint({q.sym_size(1), q.sym_size(0)}, q.options().dtype(lse_type))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> varlen_attention_backward_meta(
    const at::Tensor&, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt, std::optional<double>,
    bool) {
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint(k.sym_sizes(), k.options()),
          at::empty_symint(v.sym_sizes(), v.options())};
}

// Rows of one document as [heads, tokens, dim] in the dtype of the reference's arithmetic.
at::Tensor heads_first(const at::Tensor& t, int64_t start, int64_t length, int64_t heads) {
  const auto type = t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor rows = t.narrow(0, start, length).to(type).transpose(0, 1);
  return heads == t.size(1) ? rows.contiguous()
                            : rows.repeat_interleave(heads / t.size(1), /*dim=*/0);
}

at::Tensor masked_scores(const at::Tensor& q, const at::Tensor& k, double scale, bool causal) {
  at::Tensor scores = at::bmm(q, k.transpose(1, 2)).mul_(scale);
  if (causal) {
    const int64_t length = q.size(1);
    const at::Tensor future =
        at::ones({length, length}, q.options().dtype(at::kBool)).triu_(/*diagonal=*/1);
    scores.masked_fill_(future, -std::numeric_limits<double>::infinity());
  }
  return scores;
}

template <typename Visit>
void for_each_document(const at::Tensor& cu_seqlens, int64_t tokens, int64_t max_seqlen,
                       Visit visit) {
  check_offset_values(cu_seqlens, tokens, /*multiple=*/1, "varlen_attention");
  const int32_t* cu = cu_seqlens.const_data_ptr<int32_t>();
  for (int64_t i = 0; i + 1 < cu_seqlens.numel(); ++i) {
    const int64_t length = cu[i + 1] - cu[i];
    TORCH_CHECK_VALUE(length <= max_seqlen, "varlen_attention: document ", i, " has length ",
                      length, ", more than max_seqlen ", max_seqlen);
    if (length > 0) visit(cu[i], length);
  }
}

std::tuple<at::Tensor, at::Tensor> varlen_attention_cpu(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens,
    int64_t max_seqlen, std::optional<double> softmax_scale, bool causal) {
  auto [out, lse] = varlen_attention_meta(q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal);
  out.zero_();
  lse.zero_();
  const double scale = softmax_scale_or_default(q, softmax_scale);
  const int64_t heads = q.size(1);
  for_each_document(cu_seqlens, q.size(0), max_seqlen,
                    [&, &out = out, &lse = lse](int64_t start, int64_t length) {
                      const at::Tensor scores =
                          masked_scores(heads_first(q, start, length, heads),
                                        heads_first(k, start, length, heads), scale, causal);
                      const at::Tensor attended =
                          at::bmm(at::softmax(scores, -1), heads_first(v, start, length, heads));
                      out.narrow(0, start, length).copy_(attended.transpose(0, 1));
                      lse.narrow(1, start, length).copy_(at::logsumexp(scores, {-1}));
                    });
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> varlen_attention_backward_cpu(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& cu_seqlens, int64_t max_seqlen,
    std::optional<double> softmax_scale, bool causal) {
  auto [dq, dk, dv] = varlen_attention_backward_meta(grad, q, k, v, out, lse, cu_seqlens,
                                                     max_seqlen, softmax_scale, causal);
  dq.zero_();
  dk.zero_();
  dv.zero_();
  const double scale = softmax_scale_or_default(q, softmax_scale);
  const int64_t heads = q.size(1);
  // Query heads that share a key head add up.
  const auto store = [&](at::Tensor& target, const at::Tensor& value, int64_t start,
                         int64_t length) {
    const int64_t groups = target.size(1);
    const at::Tensor summed = value.view({groups, heads / groups, length, -1}).sum(1);
    target.narrow(0, start, length).copy_(summed.transpose(0, 1));
  };
  for_each_document(cu_seqlens, q.size(0), max_seqlen,
                    [&, &dq = dq, &dk = dk, &dv = dv](int64_t start, int64_t length) {
                      const at::Tensor q_doc = heads_first(q, start, length, heads);
                      const at::Tensor k_doc = heads_first(k, start, length, heads);
                      const at::Tensor v_doc = heads_first(v, start, length, heads);
                      const at::Tensor grad_doc = heads_first(grad, start, length, heads);
                      const at::Tensor probs =
                          at::softmax(masked_scores(q_doc, k_doc, scale, causal), -1);
                      const at::Tensor dprobs = at::bmm(grad_doc, v_doc.transpose(1, 2));
                      const at::Tensor row = (dprobs * probs).sum(-1, /*keepdim=*/true);
                      const at::Tensor dscores = (dprobs - row).mul_(probs).mul_(scale);
                      store(dq, at::bmm(dscores, k_doc), start, length);
                      store(dk, at::bmm(dscores.transpose(1, 2), q_doc), start, length);
                      store(dv, at::bmm(probs.transpose(1, 2), grad_doc), start, length);
                    });
  return {dq, dk, dv};
}

class VarlenAttention : public torch::autograd::Function<VarlenAttention> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v, const at::Tensor& cu_seqlens,
                                                c10::SymInt max_seqlen,
                                                std::optional<double> softmax_scale, bool causal) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("megagraph::varlen_attention", "")
                               .typed<std::tuple<at::Tensor, at::Tensor>(
                                   const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, c10::SymInt, std::optional<double>, bool)>();
    auto [out, lse] = op.call(q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal);
    ctx->save_for_backward({q, k, v, out, lse, cu_seqlens});
    ctx->saved_data["max_seqlen"] = max_seqlen;
    ctx->saved_data["softmax_scale"] = softmax_scale;
    ctx->saved_data["causal"] = causal;
    ctx->mark_non_differentiable({lse});
    return {out, lse};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("megagraph::varlen_attention_backward", "")
                               .typed<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
                                   const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, c10::SymInt, std::optional<double>, bool)>();
    auto [dq, dk, dv] = op.call(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4],
                                saved[5], ctx->saved_data["max_seqlen"].toSymInt(),
                                ctx->saved_data["softmax_scale"].to<std::optional<double>>(),
                                ctx->saved_data["causal"].toBool());
    return {dq, dk, dv, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

std::tuple<at::Tensor, at::Tensor> varlen_attention_autograd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens,
    c10::SymInt max_seqlen, std::optional<double> softmax_scale, bool causal) {
  auto result = VarlenAttention::apply(q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal);
  return {result[0], result[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CPU, m) {
  m.impl("varlen_attention", varlen_attention_cpu);
  m.impl("varlen_attention_backward", varlen_attention_backward_cpu);
}
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
bool has_no_rows(const at::Tensor& q, const at::Tensor& cu_seqlens, int64_t max_seqlen) {
  return q.numel() == 0 || cu_seqlens.numel() == 1 || max_seqlen == 0;
}

std::tuple<at::Tensor, at::Tensor> varlen_attention_cuda(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens,
    int64_t max_seqlen, std::optional<double> softmax_scale, bool causal) {
  check_varlen_attention(q, k, v, cu_seqlens, max_seqlen);
  check_flash(q);
  if (has_no_rows(q, cu_seqlens, max_seqlen)) {
    return {at::zeros(q.sizes(), q.options()),
            at::zeros({q.size(1), q.size(0)}, q.options().dtype(at::kFloat))};
  }
  // For documents of one row and grouped queries, FlashAttention takes a path for decoding, which
  // wants as many rows as there are documents: a tail, or an empty document, is refused there.
  const int64_t longest = std::max<int64_t>(max_seqlen, 2);
  at::Tensor out, lse;
  launch_over_documents(cu_seqlens, longest, [&] {
    std::tie(out, lse, std::ignore, std::ignore, std::ignore) = at::_flash_attention_forward(
        token_major(q), token_major(k), token_major(v), cu_seqlens, cu_seqlens, longest, longest,
        /*dropout_p=*/0.0, causal, /*return_debug_mask=*/false,
        softmax_scale_or_default(q, softmax_scale));
  });
  zero_tails_of({out}, cu_seqlens);
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> varlen_attention_backward_cuda(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& cu_seqlens, int64_t max_seqlen,
    std::optional<double> softmax_scale, bool causal) {
  if (has_no_rows(q, cu_seqlens, max_seqlen)) {
    return {at::zeros(q.sizes(), q.options()), at::zeros(k.sizes(), k.options()),
            at::zeros(v.sizes(), v.options())};
  }
  // Read only if there is dropout.
  const at::Tensor no_rng = at::empty({0}, q.options().dtype(at::kLong));
  at::Tensor dq, dk, dv;
  launch_over_documents(cu_seqlens, max_seqlen, [&] {
    std::tie(dq, dk, dv) = at::_flash_attention_backward(
        token_major(grad), token_major(q), token_major(k), token_major(v), out, lse, cu_seqlens,
        cu_seqlens, max_seqlen, max_seqlen, /*dropout_p=*/0.0, causal, no_rng, no_rng,
        softmax_scale_or_default(q, softmax_scale));
  });
  zero_tails_of({dq, dk, dv}, cu_seqlens);
  return {dq, dk, dv};
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CUDA, m) {
  m.impl("varlen_attention", varlen_attention_cuda);
  m.impl("varlen_attention_backward", varlen_attention_backward_cuda);
}
#endif

}  // namespace megagraph
