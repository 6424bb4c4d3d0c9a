// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/grid_tables.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <utility>

namespace megagraph {

void GridTables::add(const std::vector<DocumentGrid>& grids) {
  for (const DocumentGrid& grid : grids) {
    by_offsets_[grid.cu_seqlens].push_back(grid);
    tables_.erase(grid.cu_seqlens);
  }
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

const at::Tensor& GridTables::of(const at::Tensor& offsets) {
  const auto known = tables_.find(offsets.const_data_ptr());
  if (known != tables_.end()) return known->second;
  std::vector<DocumentGrid> grids = grids_of(offsets);
  at::Tensor table;
  if (!grids.empty()) {
    const auto bytes = static_cast<int64_t>(grids.size() * sizeof(DocumentGrid));
    table = at::from_blob(grids.data(), {bytes}, at::kByte).to(offsets.device());
  }
  return tables_.emplace(offsets.const_data_ptr(), std::move(table)).first->second;
}

}  // namespace megagraph
