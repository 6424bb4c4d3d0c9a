// SPDX-License-Identifier: Apache-2.0
// What a captured graph took for granted, checked before a call changes any state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megagraph {

// What one input of a site must look like.
struct TensorSignature {
  at::ScalarType dtype;
  at::Device device;
  at::DimVector sizes;
  bool requires_grad;  // captured with a gradient to return
  bool fewer_rows;     // the first dimension may be smaller: staging zeroes the rest

  static TensorSignature of(const at::Tensor& t, bool requires_grad, bool fewer_rows) {
    return {t.scalar_type(), t.device(), at::DimVector(t.sizes()), requires_grad, fewer_rows};
  }

  bool accepts(const at::Tensor& t) const {
    if (t.scalar_type() != dtype || t.device() != device || !t.is_contiguous() ||
        t.dim() != static_cast<int64_t>(sizes.size()) || (t.requires_grad() && !requires_grad)) {
      return false;
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      const bool prefix = i == 0 && fewer_rows;
      if (prefix ? t.size(0) > sizes[0] : t.size(static_cast<int64_t>(i)) != sizes[i]) return false;
    }
    return true;
  }
};

}  // namespace megagraph
