// SPDX-License-Identifier: Apache-2.0
// What autograd and we tell each other of writes in place.
//
// No release from 2.11 to 2.15 differs.
#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

namespace megagraph {

// Saved versions of `t` are stale from here on.
inline void note_write(const at::Tensor& t) { torch::autograd::impl::bump_version(t); }

// Copies without a new version: whoever has saved `to` finds other content, and raises no error.
inline void copy_unnoticed(const at::Tensor& to, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  const auto version = to._version();
  to.copy_(from);
  c10::VariableVersion counter = torch::autograd::impl::version_counter(to);
  counter.set_version(version);
}

// Whether a tensor was written in place since this was made. Keeps neither tensor nor memory alive.
class WriteWatch {
 public:
  explicit WriteWatch(const at::Tensor& t)
      : counter_(t.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.enabled() ? counter_.current_version() : 0) {}
  bool has_seen_write() const {
    return counter_.enabled() && counter_.current_version() != version_;
  }

 private:
  c10::VariableVersion counter_;  // shared with the tensor; an inference tensor has none
  uint32_t version_;
};

}  // namespace megagraph
