// SPDX-License-Identifier: Apache-2.0
// Staging: writes what enters a graph into its static buffers. One kernel launch, whatever the
// number of segments.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

namespace at {
class Tensor;
}

namespace megagraph {

enum class SegmentKind : int32_t {
  kCopy,     // src_size bytes, then zeros up to dst_size bytes
  kRows,     // like kCopy, and rows of row_bytes at or past *end are zero
  kOffsets,  // int32 offsets: src_size entries, the rest repeat the last one or hold `fill`
  kMask,     // bool per row: true at or past *end or past the src_size given entries
  kCount,    // adds the last of src_size int32 entries to an int64 counter
  // Sets the grids of dst_size `DocumentGrid`s for offsets staged as kOffsets stages them: see Note
  // [Document grids] in csrc/ops/document_grids.h. Their buffer has num_offsets entries.
  kGrids,
};

struct Segment {
  SegmentKind kind;
  const void* src;  // null: nothing to copy
  void* dst;
  int64_t src_size;
  int64_t dst_size;
  int64_t row_bytes;
  int64_t num_offsets;
  const int32_t* end;  // the last physical offset of the pack, on the same device
  int32_t fill;        // -1: repeat the last entry
};

constexpr int kMaxSegments = 16;
struct SegmentList {
  Segment at[kMaxSegments];
  int count = 0;

  void add(const Segment& segment) {
    TORCH_CHECK(count < kMaxSegments, "one staging launch takes up to ", kMaxSegments,
                " buffers and tables of grids; this site and its metadata have more");
    at[count++] = segment;
  }
};

// On the device's current stream. Nothing is launched for an empty list.
void stage(const SegmentList& segments, c10::Device device);

// Which of the table's grids (`DocumentGrid`s, as bytes) the driver lets a kernel set: sets each to
// what it was captured with, on the device's current stream, and waits. No graph of theirs runs.
std::vector<bool> settable_grids(const at::Tensor& table);

// `stream` is a cudaStream_t. Defined in CUDA builds.
void launch_staging(const SegmentList& segments, void* stream);
// The same of settable_grids(): writes a flag for each of `count` grids.
void launch_grid_trial(const void* grids, int64_t count, bool* settable, void* stream);

}  // namespace megagraph
