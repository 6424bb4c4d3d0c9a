// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/staging/metadata.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

namespace megagraph {

at::Tensor mask_content(int64_t rows, const at::Tensor& given, const at::Tensor& end) {
  at::Tensor out = at::arange(rows, end.options().dtype(at::kLong)) >= end;
  if (given.defined()) {
    out.slice(0, 0, given.numel()).logical_or_(given);
    out.slice(0, given.numel()).fill_(true);
  }
  return out;
}

at::Tensor MetadataSpec::content(const at::Tensor& buffer, const std::vector<at::Tensor>& sources,
                                 int end_source) const {
  if (!is_staged() || kind == SegmentKind::kCount) return buffer;
  const at::Tensor given = source < 0 ? at::Tensor() : sources.at(source).flatten();
  if (kind == SegmentKind::kMask) {
    const at::Tensor end = sources.at(end_source).flatten().slice(0, -1);
    return mask_content(buffer.numel(), given, end).view(buffer.sizes());
  }
  at::Tensor out = at::zeros(buffer.sizes(), buffer.options());
  const at::Tensor flat = out.view(-1), rest = flat.slice(0, given.numel());
  flat.slice(0, 0, given.numel()).copy_(given);
  if (kind == SegmentKind::kOffsets && fill >= 0) {
    rest.fill_(fill);
  } else if (kind == SegmentKind::kOffsets) {
    rest.copy_(given.slice(0, -1));
  }
  return out;
}

}  // namespace megagraph
