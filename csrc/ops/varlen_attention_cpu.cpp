// SPDX-License-Identifier: Apache-2.0
// The reference of varlen_attention on the CPU, csrc/ops/varlen_attention.cpp: the whole score
// matrix of one document at a time.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <limits>

#include "csrc/ops/checks.h"
#include "csrc/ops/varlen_attention.h"

namespace megagraph {
namespace {

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
    const int64_t queries = q.size(1), keys = k.size(1);
    const at::Tensor future = at::ones({queries, keys}, q.options().dtype(at::kBool))
                                  .triu_(/*diagonal=*/1 + keys - queries);
    scores.masked_fill_(future, -std::numeric_limits<double>::infinity());
  }
  return scores;
}

// Rows of one document, of queries and of keys.
struct Document {
  int64_t start_q, length_q, start_k, length_k;
};

int64_t length_of(const at::Tensor& cu_seqlens, int64_t document, int64_t max_seqlen) {
  const int32_t* cu = cu_seqlens.const_data_ptr<int32_t>();
  const int64_t length = cu[document + 1] - cu[document];
  TORCH_CHECK_VALUE(length <= max_seqlen, "varlen_attention: document ", document, " has length ",
                    length, ", more than max_seqlen ", max_seqlen);
  return length;
}

template <typename Visit>
void for_each_document(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cu_seqlens_q,
                       const at::Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                       Visit visit) {
  check_offset_values(cu_seqlens_q, q.size(0), /*multiple=*/1, "varlen_attention");
  check_offset_values(cu_seqlens_k, k.size(0), /*multiple=*/1, "varlen_attention");
  for (int64_t i = 0; i + 1 < cu_seqlens_q.numel(); ++i) {
    const Document document{
        cu_seqlens_q.const_data_ptr<int32_t>()[i], length_of(cu_seqlens_q, i, max_seqlen_q),
        cu_seqlens_k.const_data_ptr<int32_t>()[i], length_of(cu_seqlens_k, i, max_seqlen_k)};
    if (document.length_q > 0 && document.length_k > 0) visit(document);
  }
}

std::tuple<at::Tensor, at::Tensor> varlen_attention_cpu(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> softmax_scale, bool causal) {
  auto [out, lse] = varlen_attention_meta(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                          max_seqlen_k, softmax_scale, causal);
  const c10::impl::ExcludeDispatchKeyGuard own_dtypes(c10::autocast_dispatch_keyset);
  out.zero_();
  lse.zero_();
  const double scale = softmax_scale_or_default(q, softmax_scale);
  const int64_t heads = q.size(1);
  for_each_document(
      q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
      [&, &out = out, &lse = lse](const Document& at) {
        const at::Tensor scores =
            masked_scores(heads_first(q, at.start_q, at.length_q, heads),
                          heads_first(k, at.start_k, at.length_k, heads), scale, causal);
        const at::Tensor attended =
            at::bmm(at::_safe_softmax(scores, -1), heads_first(v, at.start_k, at.length_k, heads));
        out.narrow(0, at.start_q, at.length_q).copy_(attended.transpose(0, 1));
        lse.narrow(1, at.start_q, at.length_q).copy_(at::logsumexp(scores, {-1}));
      });
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> varlen_attention_backward_cpu(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> softmax_scale, bool causal) {
  auto [dq, dk, dv] =
      varlen_attention_backward_meta(grad, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
                                     max_seqlen_q, max_seqlen_k, softmax_scale, causal);
  const c10::impl::ExcludeDispatchKeyGuard own_dtypes(c10::autocast_dispatch_keyset);
  dq.zero_();
  dk.zero_();
  dv.zero_();
  if (q.numel() == 0) return {dq, dk, dv};  // shares of no heads have no number
  const double scale = softmax_scale_or_default(q, softmax_scale);
  const int64_t heads = q.size(1);
  // Query heads that share a key head add up.
  const auto store = [&](at::Tensor& target, const at::Tensor& value, int64_t start,
                         int64_t length) {
    const int64_t groups = target.size(1);
    const at::Tensor summed = value.view({groups, heads / groups, length, -1}).sum(1);
    target.narrow(0, start, length).copy_(summed.transpose(0, 1));
  };
  for_each_document(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                    [&, &dq = dq, &dk = dk, &dv = dv](const Document& at) {
                      const at::Tensor q_doc = heads_first(q, at.start_q, at.length_q, heads);
                      const at::Tensor k_doc = heads_first(k, at.start_k, at.length_k, heads);
                      const at::Tensor v_doc = heads_first(v, at.start_k, at.length_k, heads);
                      const at::Tensor grad_doc = heads_first(grad, at.start_q, at.length_q, heads);
                      const at::Tensor probs =
                          at::_safe_softmax(masked_scores(q_doc, k_doc, scale, causal), -1);
                      const at::Tensor dprobs = at::bmm(grad_doc, v_doc.transpose(1, 2));
                      const at::Tensor row = (dprobs * probs).sum(-1, /*keepdim=*/true);
                      const at::Tensor dscores = (dprobs - row).mul_(probs).mul_(scale);
                      store(dq, at::bmm(dscores, k_doc), at.start_q, at.length_q);
                      store(dk, at::bmm(dscores.transpose(1, 2), q_doc), at.start_k, at.length_k);
                      store(dv, at::bmm(probs.transpose(1, 2), grad_doc), at.start_k, at.length_k);
                    });
  return {dq, dk, dv};
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CPU, m) {
  m.impl("varlen_attention", varlen_attention_cpu);
  m.impl("varlen_attention_backward", varlen_attention_backward_cpu);
}

}  // namespace megagraph
