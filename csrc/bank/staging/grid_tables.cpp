// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/staging/grid_tables.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

namespace megagraph {

void GridTables::add(const std::vector<DocumentGrid>& grids) {
  for (const DocumentGrid& grid : grids) by_offsets_[grid.cu_seqlens].push_back(grid);
}

// A kernel that reads a part of the buffer was captured for fewer documents than staging counts.
std::vector<DocumentGrid> GridTables::grids_of(const at::Tensor& offsets) const {
  std::vector<DocumentGrid> found;
  const auto all = by_offsets_.find(offsets.const_data_ptr());
  if (all == by_offsets_.end()) return found;
  for (const DocumentGrid& grid : all->second) {
    if (grid.num_seqs == offsets.numel() - 1) found.push_back(grid);
  }
  return found;
}

int GridTables::count(const at::Tensor& offsets) const {
  return static_cast<int>(grids_of(offsets).size());
}

void GridTables::make(const at::Tensor& offsets) {
  std::vector<DocumentGrid> grids = grids_of(offsets);
  if (grids.empty()) return;
  const auto bytes = static_cast<int64_t>(grids.size() * sizeof(DocumentGrid));
  at::Tensor& table = tables_[offsets.const_data_ptr()];
  // One that is complete stays: what staged a micro-batch may still be about to read it.
  if (table.defined() && table.numel() == bytes) return;
  table = at::from_blob(grids.data(), {bytes}, at::kByte).to(offsets.device());
}

const at::Tensor& GridTables::of(const at::Tensor& offsets) const {
  static const at::Tensor none;
  const auto found = tables_.find(offsets.const_data_ptr());
  return found == tables_.end() ? none : found->second;
}

}  // namespace megagraph
