// SPDX-License-Identifier: Apache-2.0
// Small buffers that graphs read beside their input, and what a call that runs eager gets instead.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "csrc/bank/staging/staging.h"

namespace megagraph {

// A buffer that staging refills for each micro-batch.
struct MetadataSpec {
  SegmentKind kind;
  at::Tensor example;  // its content during warm-up and capture
  // Index into the sources that begin() is given; -1: none. A mask without one has the pack's end
  // alone; any other buffer without one is constant.
  int source = -1;
  int32_t fill = -1;    // past the source's entries; -1 repeats its last one
  bool shared = false;  // one buffer for all slots, the example itself

  bool is_staged() const { return source >= 0 || kind == SegmentKind::kMask; }
  // A slot's buffer, filled with the example.
  at::Tensor buffer() const { return shared ? example : example.clone(); }
  // What staging would write into a buffer for a micro-batch, in memory of its own: a call that
  // runs eager may need it in its backward, when the buffer holds another micro-batch's. Counters
  // and constants are the buffer itself. `end_source`: whose last entry is the pack's end, for a
  // mask. Never waits for the device.
  at::Tensor content(const at::Tensor& buffer, const std::vector<at::Tensor>& sources,
                     int end_source) const;
};

// What staging writes into a mask, bool [rows]: true at or past `end`, a tensor of one entry, and
// past the entries of `given`, or where these are. `given` is undefined for the end alone.
at::Tensor mask_content(int64_t rows, const at::Tensor& given, const at::Tensor& end);

}  // namespace megagraph
