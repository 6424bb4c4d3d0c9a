// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/variant_layout.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>

namespace megagraph {
namespace {

// Offsets of a legal pack that fills the capacity on each of the ranks that share it.
at::Tensor example_offsets(const Capacity& capacity, int64_t cp_size, at::Device device) {
  const int64_t multiple = cp_size == 1 ? 1 : 2 * cp_size;
  const int64_t longest = capacity.max_seqlen / multiple * multiple;
  const at::Tensor ends = at::arange(capacity.num_seqs + 1, at::kLong) * longest;
  return ends.clamp_max(capacity.tokens * cp_size).to(at::kInt).to(device);
}

}  // namespace

VariantLayout::VariantLayout(const CanonicalPacks& packs, int64_t rows,
                             const at::Tensor& valid_tokens, const std::vector<at::Tensor>& freqs,
                             bool masks_tail) {
  const VariantKey& key = packs.key();
  const Capacity& capacity = key.capacity.value();
  const bool is_shared = key.cp_size > 1;
  // What a micro-batch hands over: offsets, documents of rows, offsets of this rank's rows, and
  // behind them frequencies and a mask.
  const int physical = key.form.has_padded ? 1 : 0;
  const int behind = physical + (key.form.has_seq_idx ? 1 : 0) + 1;
  const int of_rows = is_shared ? behind : physical, of_freqs = is_shared ? behind + 1 : behind;
  const at::Tensor example = example_offsets(capacity, key.cp_size, valid_tokens.device());
  const auto add = [&](std::string name, MetadataSpec spec) {
    metadata.emplace_back(std::move(name), std::move(spec));
  };
  const auto offsets = [](at::Tensor like, int source, int64_t fill = -1) {
    return MetadataSpec{SegmentKind::kOffsets, std::move(like), source, static_cast<int32_t>(fill)};
  };
  const auto added = packs.added_offsets();
  for (const auto& [name, end] : added) {
    add(name, offsets(example, name == "padded" ? physical : 0, end.value_or(-1)));
  }
  add("valid_tokens",
      {SegmentKind::kCount, valid_tokens, is_shared ? of_rows : 0, -1, /*shared=*/true});
  std::string ends = key.form.has_padded ? "padded" : "actual";
  if (is_shared || added.at(ends)) {  // where no other buffer ends with this rank's rows
    ends = "rows";
    add(ends, offsets(at::floor_divide(example, key.cp_size), of_rows));
  }
  is_whole = rows == capacity.tokens;
  if (key.has_mask || masks_tail) {
    const int source = key.has_mask ? of_freqs + static_cast<int>(freqs.size()) : -1;
    const at::Tensor none = at::zeros({rows}, example.options().dtype(at::kBool));
    add("padding_mask", {is_whole ? SegmentKind::kMask : SegmentKind::kCopy, none, source});
  }
  for (size_t i = 0; i < freqs.size(); ++i) {  // of all ranks' rows, too
    std::vector<int64_t> sizes = freqs[i].sizes().vec();
    sizes[0] = capacity.tokens;
    add("rotary_pos_emb." + std::to_string(i),
        {SegmentKind::kCopy, freqs[i].new_zeros(sizes), of_freqs + static_cast<int>(i)});
  }
  if (key.form.has_seq_idx) {  // of all ranks' rows, of which those past the pack are no document's
    add("seq_idx",
        offsets(at::zeros({capacity.tokens}, example.options()), physical + 1, capacity.num_seqs));
  }
  if (is_whole) {
    end_source = of_rows;
    end_buffer = std::move(ends);
  }
}

}  // namespace megagraph
