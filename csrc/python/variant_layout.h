// SPDX-License-Identifier: Apache-2.0
// Which buffers of metadata the graphs of a variant read, and what of a micro-batch fills each.
//
// `seq_idx`, the document of each row, a padding mask, and rotary frequencies with a row for each
// token are more buffers, of which layers get views. Rows past the pack have the number after the
// capacity's last document, are masked, and are not rotated.
//
// If context-parallel ranks share a pack, its offsets are those of the whole pack on each of them.
// A capacity's tokens are a rank's own, its longest document is one of all of them together, and
// canonical offsets end where all their rows do. What asks for the end of this rank's rows reads
// offsets of its own, made of the others by a division: one more source of a micro-batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/bank/staging/metadata.h"
#include "csrc/python/canonical_packs.h"

namespace megagraph {

struct VariantLayout {
  // `rows`: of hidden states, on this rank. `valid_tokens`, int64 [1], counts those of replayed
  // packs. `freqs` are like frequencies of each token, without rows. `masks_tail`: rows past the
  // pack's end are masked, whether the user gives a mask or not.
  VariantLayout(const CanonicalPacks& packs, int64_t rows, const at::Tensor& valid_tokens,
                const std::vector<at::Tensor>& freqs, bool masks_tail);

  std::vector<std::pair<std::string, MetadataSpec>> metadata;  // by buffer
  // Rows are those of the capacity. Ranks that share rows get them padded from the embedding: no
  // rank's rows end where the pack does.
  bool is_whole;
  // The source and the buffer that end with this rank's rows; none where rows are not whole.
  int end_source = -1;
  std::optional<std::string> end_buffer;
};

}  // namespace megagraph
