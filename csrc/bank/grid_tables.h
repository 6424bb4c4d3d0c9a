// SPDX-License-Identifier: Apache-2.0
// What the graphs of one variant in one slot launch over documents, as staging reads it.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

#include "csrc/ops/document_grids.h"

namespace megagraph {

class GridTables {
 public:
  void add(const std::vector<DocumentGrid>& grids);
  // Of the kernels that read the whole of this buffer of offsets: how many, and their
  // `DocumentGrid`s in its device's memory, as bytes; undefined where there are none. The first
  // request for the latter after an addition copies, and waits.
  int count(const at::Tensor& offsets) const;
  const at::Tensor& of(const at::Tensor& offsets);

 private:
  std::vector<DocumentGrid> grids_of(const at::Tensor& offsets) const;

  std::unordered_map<const void*, std::vector<DocumentGrid>> by_offsets_;
  std::unordered_map<const void*, at::Tensor> tables_;
};

}  // namespace megagraph
