// SPDX-License-Identifier: Apache-2.0
// What somebody has told torch to do with every op, or with every tensor that autograd saves, on
// this thread: a replay makes no ops and saves nothing.
//
// No release from 2.11 to 2.15 differs.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/utils/disable_torch_function.h>

namespace megagraph {

// Such as torch.utils.checkpoint(use_reentrant=False) and save_on_cpu() have.
inline bool has_saved_tensor_hooks() {
  return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

inline bool has_dispatch_modes() { return c10::impl::dispatch_mode_enabled(); }

// While it lives, ops of this thread reach no dispatch of Python's.
using NoDispatchModes = torch::DisableTorchDispatch;

}  // namespace megagraph
