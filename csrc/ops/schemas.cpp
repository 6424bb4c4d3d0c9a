// SPDX-License-Identifier: Apache-2.0
// The menu: every op of torch.ops.megagraph. Each backend registers in the file that implements it.
//
// Words: T physical tokens, N document slots, H heads, D head dimension. The *tail* is every row at
// or past the last offset; each op's file says first what happens there.

#include <torch/library.h>

TORCH_LIBRARY(megagraph, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};

  m.def("pad_cu_seqlens(Tensor cu_seqlens, SymInt capacity, SymInt? end=None) -> Tensor", tags);
  m.def(
      "thd_partition_indices(Tensor cu_seqlens_padded, SymInt total_tokens, int cp_size, "
      "int cp_rank) -> Tensor",
      tags);
  m.def("thd_gathered_rows(Tensor cu_seqlens_padded, SymInt total_tokens, int cp_size) -> Tensor",
        tags);
  m.def(
      "thd_context_keys(Tensor cu_seqlens_padded, SymInt total_tokens, int cp_size, int cp_rank) "
      "-> (Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor keys, Tensor places)",
      tags);
  m.def("zero_tail(Tensor x, Tensor cu_seqlens, SymInt tokens) -> Tensor", tags);
  m.def("zero_tail_(Tensor(a!)[] xs, Tensor cu_seqlens) -> ()", tags);

  m.def(
      "rope_thd(Tensor[] tensors, Tensor cos, Tensor sin, Tensor cu_seqlens_padded, *, "
      "bool interleaved=False, bool mla_interleaved=False, int cp_size=1, int cp_rank=0) "
      "-> Tensor[]",
      tags);
  m.def(
      "rope_thd_backward(Tensor[] grads, Tensor cos, Tensor sin, Tensor cu_seqlens_padded, *, "
      "bool interleaved=False, bool mla_interleaved=False, int cp_size=1, int cp_rank=0) "
      "-> Tensor[]",
      tags);

  // Not traced: torch makes no functional form of an op that both writes and returns a list.
  m.def(
      "rope_mla_(Tensor(a!)? q, Tensor? kv, Tensor? k_pe, Tensor cos, Tensor sin, "
      "Tensor cu_seqlens_padded, *, int v_dim=0, int cp_size=1, int cp_rank=0) "
      "-> Tensor[]");
  m.def(
      "rope_mla_backward(Tensor? dq, Tensor? dk, Tensor? dv, Tensor cos, Tensor sin, "
      "Tensor cu_seqlens_padded, *, int cp_size=1, int cp_rank=0) -> Tensor[]",
      tags);

  m.def(
      "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, *, float? softmax_scale=None, bool causal=True) "
      "-> (Tensor out, Tensor softmax_lse)",
      tags);
  m.def(
      "varlen_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor softmax_lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
      "SymInt max_seqlen_k, *, float? softmax_scale=None, bool causal=True) "
      "-> (Tensor, Tensor, Tensor)",
      tags);
}
