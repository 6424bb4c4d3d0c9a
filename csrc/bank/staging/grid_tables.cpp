// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/staging/grid_tables.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>

#include "csrc/bank/staging/staging.h"

namespace megagraph {

namespace {

at::Tensor to_device(std::vector<DocumentGrid>& grids, c10::Device device) {
  const auto bytes = static_cast<int64_t>(grids.size() * sizeof(DocumentGrid));
  return at::from_blob(grids.data(), {bytes}, at::kByte).to(device);
}

}  // namespace

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
  Table& table = tables_[offsets.const_data_ptr()];
  // One that is complete stays: what staged a micro-batch may still be about to read it.
  if (table.num_tried == grids.size()) return;
  table.num_tried = grids.size();
  table.grids = to_device(grids, offsets.device());
  // A kernel whose grid cannot be set keeps the one of its capture, which holds every pack.
  const std::vector<bool> settable = settable_grids(table.grids);
  if (std::all_of(settable.begin(), settable.end(), [](bool is) { return is; })) return;
  std::vector<DocumentGrid> kept;
  for (size_t i = 0; i < grids.size(); ++i) {
    if (settable[i]) kept.push_back(grids[i]);
  }
  table.grids = kept.empty() ? at::Tensor() : to_device(kept, offsets.device());
}

const at::Tensor& GridTables::of(const at::Tensor& offsets) const {
  static const at::Tensor none;
  const auto found = tables_.find(offsets.const_data_ptr());
  return found == tables_.end() ? none : found->second.grids;
}

}  // namespace megagraph
