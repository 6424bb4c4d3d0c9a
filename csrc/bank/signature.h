// SPDX-License-Identifier: Apache-2.0
// What a captured graph took for granted, checked before a call changes any state.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>

#include <cstdint>

namespace megagraph {

// What one input of a site must look like.
struct TensorSignature {
  at::ScalarType dtype;
  at::Device device;
  at::DimVector sizes;
  // How its entries are to be read, apart from autograd: a subclass with a dispatch of its own, a
  // fake tensor, one inside a transform, a lazy negative and the like have further keys.
  c10::DispatchKeySet keys;
  bool requires_grad;  // captured with a gradient to return, which nobody asks for in no_grad mode
  bool fewer_rows;     // the first dimension may be smaller: staging zeroes the rest

  static TensorSignature of(const at::Tensor& t, bool requires_grad, bool fewer_rows) {
    return {t.scalar_type(), t.device(),    at::DimVector(t.sizes()),
            keys_of(t),      requires_grad, fewer_rows};
  }

  bool accepts(const at::Tensor& t) const {
    // The keys first: a tensor of another kind may have no strides to ask for.
    if (keys_of(t) != keys || t.scalar_type() != dtype || t.device() != device ||
        !t.is_contiguous() || t.dim() != static_cast<int64_t>(sizes.size()) ||
        (t.requires_grad() && !requires_grad && at::GradMode::is_enabled()) ||
        t._fw_grad(/*level=*/0).defined()) {
      return false;
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      const bool prefix = i == 0 && fewer_rows;
      if (prefix ? t.size(0) > sizes[0] : t.size(static_cast<int64_t>(i)) != sizes[i]) return false;
    }
    return true;
  }

 private:
  static c10::DispatchKeySet keys_of(const at::Tensor& t) {
    return t.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
           c10::autocast_dispatch_keyset;
  }
};

}  // namespace megagraph
