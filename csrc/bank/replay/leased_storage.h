// SPDX-License-Identifier: Apache-2.0
// Tensors over boundary buffers that hold the lease of their slot.
//
// Note [Leased tensors]
// A site's output lies in a buffer that the bank owns, but it is handed out as a tensor over a
// fresh StorageImpl of its own, whose deleter drops one holder of the slot. So `_base` is None, and
// Megatron's `untyped_storage().resize_(0)`, `.data =`, views and tensors that eager autograd saves
// are all counted exactly, and none of them can free or move the bank's buffer.
//
// A slot whose lease has a holder is not given out, and a micro-batch that finds none runs eager.
// If the graphs hold collectives that goes only for slots whose backward is still to come, as many
// on every rank. A tensor that somebody keeps is an error then, which names it: a rank that falls
// back alone would hang its group.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "csrc/bank/replay/slot_ring.h"

namespace megagraph {

// A detached tensor over the first `rows` rows of `boundary` (all of them by default). `boundary`
// must be contiguous.
at::Tensor lease_tensor(const at::Tensor& boundary, const std::shared_ptr<Slot>& slot, int site,
                        LeaseKind kind, std::optional<int64_t> rows = std::nullopt);

}  // namespace megagraph
