// SPDX-License-Identifier: Apache-2.0
// What the sides of varlen_attention share: checks of its arguments, and results to write into.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace megagraph {

void check_varlen_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                            c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k);

double softmax_scale_or_default(const at::Tensor& q, std::optional<double> softmax_scale);

std::tuple<at::Tensor, at::Tensor> varlen_attention_meta(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k,
    std::optional<double>, bool);

std::tuple<at::Tensor, at::Tensor, at::Tensor> varlen_attention_backward_meta(
    const at::Tensor&, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymInt,
    c10::SymInt, std::optional<double>, bool);

}  // namespace megagraph
