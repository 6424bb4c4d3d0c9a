// SPDX-License-Identifier: Apache-2.0
// The arguments of rope_mla_ and its backward: what they must be, and what is made for the results.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace megagraph {

constexpr const char* kRopeMla = "rope_mla";
constexpr int64_t kMaxRopeMlaDim = 256;

using MaybeTensor = std::optional<at::Tensor>;

// Every tensor that a direction reads and writes, each [T, heads, dim]. Those of the queries, or
// those of keys and values, may be undefined.
struct RopeMlaTensors {
  at::Tensor q, q_out;  // forward one and the same, backward the gradients of output and input
  at::Tensor kv, k_pe;  // forward read, backward written
  at::Tensor k, v;      // forward written, backward read
  at::Tensor cos, sin, cu_seqlens;
  int64_t cp_size, cp_rank;

  int64_t tokens() const { return (q.defined() ? q : kv).size(0); }
  // What the op returns.
  std::vector<at::Tensor> results(bool backward) const;
};

RopeMlaTensors rope_mla_tensors(const MaybeTensor& q, const MaybeTensor& kv,
                                const MaybeTensor& k_pe, const at::Tensor& cos,
                                const at::Tensor& sin, const at::Tensor& cu_seqlens_padded,
                                int64_t v_dim, int64_t cp_size, int64_t cp_rank);
RopeMlaTensors rope_mla_backward_tensors(const MaybeTensor& dq, const MaybeTensor& dk,
                                         const MaybeTensor& dv, const at::Tensor& cos,
                                         const at::Tensor& sin, const at::Tensor& cu_seqlens_padded,
                                         int64_t cp_size, int64_t cp_rank);

}  // namespace megagraph
