// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/grid_tables.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

namespace megagraph {

void GridTables::add(const std::vector<DocumentGrid>& grids) {
  for (const DocumentGrid& grid : grids) {
    by_offsets_[grid.cu_seqlens].push_back(grid);
    tables_.erase(grid.cu_seqlens);
  }
}

int GridTables::size() const {
  size_t count = 0;
  for (const auto& [offsets, grids] : by_offsets_) count += grids.size();
  return static_cast<int>(count);
}

const at::Tensor& GridTables::of(const at::Tensor& offsets) {
  static const at::Tensor none;
  const auto found = by_offsets_.find(offsets.const_data_ptr());
  if (found == by_offsets_.end()) return none;
  at::Tensor& table = tables_[found->first];
  if (!table.defined()) {
    const auto bytes = static_cast<int64_t>(found->second.size() * sizeof(DocumentGrid));
    table = at::from_blob(found->second.data(), {bytes}, at::kByte).to(offsets.device());
  }
  return table;
}

}  // namespace megagraph
