// SPDX-License-Identifier: Apache-2.0
#include "csrc/ops/rope_mla_tensors.h"

#include <ATen/ops/empty.h>

#include <initializer_list>

#include "csrc/ops/checks.h"

namespace megagraph {
namespace {

void check_table(const at::Tensor& cos, const at::Tensor& sin) {
  TORCH_CHECK_VALUE(cos.dim() == 2 && sin.sym_sizes() == cos.sym_sizes(), kRopeMla,
                    ": cos and sin must both be [positions, rotary_dim], got ", cos.sym_sizes(),
                    " and ", sin.sym_sizes());
  TORCH_CHECK_VALUE(cos.is_contiguous() && sin.is_contiguous(), kRopeMla,
                    ": cos and sin must be contiguous");
  rope_scalar_of(cos.scalar_type(), kRopeMla);
  const c10::SymInt rotary_dim = cos.sym_size(1);
  TORCH_CHECK_VALUE(rotary_dim % 2 == 0 && rotary_dim > 0 && rotary_dim <= kMaxRopeMlaDim, kRopeMla,
                    ": rotary_dim must be even, positive and at most ", kMaxRopeMlaDim, ", got ",
                    rotary_dim);
}

// Checks the tensors that are given against the tables and the first of them.
RopeMlaTensors checked(std::initializer_list<const MaybeTensor*> given, const at::Tensor& cos,
                       const at::Tensor& sin, const at::Tensor& cu_seqlens_padded, int64_t cp_size,
                       int64_t cp_rank) {
  check_cu_seqlens(cu_seqlens_padded, kRopeMla);
  check_context_parallel(cp_size, cp_rank, kRopeMla);
  check_table(cos, sin);
  const at::Tensor* first = nullptr;
  for (const MaybeTensor* maybe : given) {
    if (!maybe->has_value()) continue;
    const at::Tensor& t = **maybe;
    if (first == nullptr) first = &t;
    TORCH_CHECK_VALUE(t.dim() == 3, kRopeMla, ": expected [tokens, heads, dim], got shape ",
                      t.sym_sizes());
    TORCH_CHECK_VALUE(t.sym_size(0) == first->sym_size(0), kRopeMla,
                      ": all tensors need the same number of tokens, got ", first->sym_size(0),
                      " and ", t.sym_size(0));
    TORCH_CHECK_VALUE(cos.scalar_type() == t.scalar_type() && sin.scalar_type() == t.scalar_type(),
                      kRopeMla, ": cos and sin must have the tensors' dtype ", t.scalar_type(),
                      ", got ", cos.scalar_type(), " and ", sin.scalar_type());
    check_same_device(t, cos, kRopeMla);
    check_same_device(t, sin, kRopeMla);
    check_same_device(t, cu_seqlens_padded, kRopeMla);
  }
  TORCH_CHECK_VALUE(first != nullptr, kRopeMla, ": expected queries, or keys and values, or both");
  RopeMlaTensors all{};
  all.cos = cos;
  all.sin = sin;
  all.cu_seqlens = cu_seqlens_padded;
  all.cp_size = cp_size;
  all.cp_rank = cp_rank;
  return all;
}

at::Tensor with_dense_heads(const at::Tensor& t) {
  return t.sym_stride(2) == 1 ? t : t.contiguous();
}

at::Tensor new_like(const at::Tensor& t, const c10::SymInt& heads, const c10::SymInt& dim) {
  return at::empty_symint({t.sym_size(0), heads, dim}, t.options());
}

}  // namespace

RopeMlaTensors rope_mla_tensors(const MaybeTensor& q, const MaybeTensor& kv,
                                const MaybeTensor& k_pe, const at::Tensor& cos,
                                const at::Tensor& sin, const at::Tensor& cu_seqlens_padded,
                                int64_t v_dim, int64_t cp_size, int64_t cp_rank) {
  RopeMlaTensors all = checked({&q, &kv, &k_pe}, cos, sin, cu_seqlens_padded, cp_size, cp_rank);
  const c10::SymInt rotary_dim = cos.sym_size(1);
  if (q) {
    TORCH_CHECK_VALUE(q->sym_size(2) >= rotary_dim, kRopeMla, ": rotary_dim ", rotary_dim,
                      " is larger than the queries' dimension ", q->sym_size(2));
    TORCH_CHECK_VALUE(q->is_non_overlapping_and_dense() || q->sym_numel() == 0, kRopeMla,
                      ": queries are written in place and must be dense");
    TORCH_CHECK_VALUE(q->sym_stride(2) == 1, kRopeMla,
                      ": the queries' last dimension must be contiguous");
    all.q = all.q_out = *q;
  }
  TORCH_CHECK_VALUE(kv.has_value() == k_pe.has_value(), kRopeMla, ": kv and k_pe belong together");
  if (kv) {
    TORCH_CHECK_VALUE(k_pe->sym_size(1) == 1 && k_pe->sym_size(2) == rotary_dim, kRopeMla,
                      ": k_pe must be [tokens, 1, ", rotary_dim, "], got ", k_pe->sym_sizes());
    TORCH_CHECK_VALUE(0 <= v_dim && v_dim <= kv->sym_size(2), kRopeMla,
                      ": v_dim must lie within kv's ", kv->sym_size(2), " dimensions, got ", v_dim);
    all.kv = with_dense_heads(*kv);
    all.k_pe = with_dense_heads(*k_pe);
    all.k = new_like(all.kv, all.kv.sym_size(1), all.kv.sym_size(2) - v_dim + rotary_dim);
    all.v = new_like(all.kv, all.kv.sym_size(1), v_dim);
  }
  return all;
}

RopeMlaTensors rope_mla_backward_tensors(const MaybeTensor& dq, const MaybeTensor& dk,
                                         const MaybeTensor& dv, const at::Tensor& cos,
                                         const at::Tensor& sin, const at::Tensor& cu_seqlens_padded,
                                         int64_t cp_size, int64_t cp_rank) {
  RopeMlaTensors all = checked({&dq, &dk, &dv}, cos, sin, cu_seqlens_padded, cp_size, cp_rank);
  const c10::SymInt rotary_dim = cos.sym_size(1);
  for (const MaybeTensor* t : {&dq, &dk}) {
    TORCH_CHECK_VALUE(!t->has_value() || (*t)->sym_size(2) >= rotary_dim, kRopeMla, ": rotary_dim ",
                      rotary_dim, " is larger than the gradient's dimension ",
                      t->has_value() ? (*t)->sym_size(2) : c10::SymInt(0));
  }
  if (dq) {
    all.q = with_dense_heads(*dq);
    all.q_out = new_like(all.q, all.q.sym_size(1), all.q.sym_size(2));
  }
  TORCH_CHECK_VALUE(dk.has_value() == dv.has_value(), kRopeMla, ": dk and dv belong together");
  if (dk) {
    TORCH_CHECK_VALUE(dk->sym_size(1) == dv->sym_size(1), kRopeMla,
                      ": dk and dv need the same heads, got ", dk->sym_size(1), " and ",
                      dv->sym_size(1));
    all.k = with_dense_heads(*dk);
    all.v = with_dense_heads(*dv);
    all.kv = new_like(all.k, all.k.sym_size(1), all.k.sym_size(2) - rotary_dim + all.v.sym_size(2));
    all.k_pe = new_like(all.k, 1, rotary_dim);
  }
  return all;
}

std::vector<at::Tensor> RopeMlaTensors::results(bool backward) const {
  std::vector<at::Tensor> made;
  if (backward && q_out.defined()) made.push_back(q_out);
  if (kv.defined()) {
    made.push_back(backward ? kv : k);
    made.push_back(backward ? k_pe : v);
  }
  return made;
}

}  // namespace megagraph
