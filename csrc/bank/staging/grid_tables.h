// SPDX-License-Identifier: Apache-2.0
// What the graphs of one variant in one slot launch over documents, as staging reads it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <unordered_map>
#include <vector>

#include "csrc/ops/document_grids.h"

namespace megagraph {

class GridTables {
 public:
  void add(const std::vector<DocumentGrid>& grids);
  // Of the kernels that read the whole of this buffer of offsets: how many; copies their
  // `DocumentGrid`s to its device, and waits for it; what was copied, as bytes, undefined where
  // there are none.
  int count(const at::Tensor& offsets) const;
  void make(const at::Tensor& offsets);
  const at::Tensor& of(const at::Tensor& offsets) const;

 private:
  std::vector<DocumentGrid> grids_of(const at::Tensor& offsets) const;

  std::unordered_map<const void*, std::vector<DocumentGrid>> by_offsets_;
  struct Table {
    size_t num_tried = 0;
    at::Tensor grids;  // as bytes
  };
  std::unordered_map<const void*, Table> tables_;
};

}  // namespace megagraph
