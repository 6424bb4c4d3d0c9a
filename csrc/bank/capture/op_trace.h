// SPDX-License-Identifier: Apache-2.0
// Remembers which op started last, so that a failed capture can name it: an error raised inside an
// autograd thread or by the CUDA driver carries no Python line.
#pragma once

#include <ATen/record_function.h>

#include <string>

namespace megagraph {

// Observes every op of the process while it lives. Cold path only.
class OpTrace {
 public:
  OpTrace();
  ~OpTrace();
  OpTrace(const OpTrace&) = delete;
  OpTrace& operator=(const OpTrace&) = delete;

  // The op that started last with the ops it was called by, "aten::item >
  // aten::_local_scalar_dense".
  std::string last_op() const;

 private:
  at::CallbackHandle handle_;
};

}  // namespace megagraph
