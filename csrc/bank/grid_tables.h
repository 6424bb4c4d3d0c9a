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
  int size() const;
  // Of the kernels that read this buffer of offsets: `DocumentGrid`s in its device's memory, as
  // bytes. Undefined where there are none. The first request after an addition copies, and waits.
  const at::Tensor& of(const at::Tensor& offsets);

 private:
  std::unordered_map<const void*, std::vector<DocumentGrid>> by_offsets_;
  std::unordered_map<const void*, at::Tensor> tables_;
};

}  // namespace megagraph
