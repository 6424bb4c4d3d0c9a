// SPDX-License-Identifier: Apache-2.0
#include <c10/cuda/CUDAException.h>
#include <c10/macros/Macros.h>

#include <algorithm>

#include "csrc/bank/staging/staging.h"
#include "csrc/ops/document_grids.h"

namespace megagraph {
namespace {

constexpr int kThreads = 256;
// Each thread has this many loads in flight, and a block copies one contiguous piece: from 32 MiB
// on it reaches 93 % of a copy's bandwidth and more on an H200 (docs/performance.md).
constexpr int kLoads = 4;
constexpr int64_t kBytesPerBlock = int64_t{kThreads} * kLoads * 16;
constexpr int64_t kMaxBlocksPerSegment = 1 << 20;

struct Grid {
  SegmentList segments;
  int32_t first_block[kMaxSegments + 1];
  bool wide[kMaxSegments];  // 16-byte accesses are possible
};

// Copies `given` bytes, of which those at or past `kept()` become zero like the rest of the target.
// What was given is loaded before `kept()`, which may read memory, is waited for.
template <typename Word, typename Kept>
__device__ void copy_and_zero(const Segment& s, Kept kept, int64_t thread, int64_t threads) {
  const auto* in = static_cast<const Word*>(s.src);
  auto* out = static_cast<Word*>(s.dst);
  const int64_t given = s.src_size / sizeof(Word), total = s.dst_size / sizeof(Word);
  const int64_t lane = thread % kThreads, piece = int64_t{kThreads} * kLoads;
  for (int64_t first = thread / kThreads * piece + lane; first < total;
       first += threads / kThreads * piece) {
    Word words[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int64_t i = first + k * kThreads;
      words[k] = i < given ? in[i] : Word{};
    }
    const int64_t valid = kept() / static_cast<int64_t>(sizeof(Word));
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int64_t i = first + k * kThreads;
      if (i < total) out[i] = i < valid ? words[k] : Word{};
    }
  }
}

// The entry of a buffer of offsets that a kOffsets or a kGrids segment stages.
__device__ int32_t offset_at(const Segment& s, int64_t i) {
  const auto* in = static_cast<const int32_t*>(s.src);
  if (i < s.src_size) return in[i];
  return s.fill >= 0 ? s.fill : in[s.src_size - 1];
}

// Called by whole blocks: each finds the pack's documents, and sets its share of the grids.
__device__ void set_grids(const Segment& s, int64_t thread, int64_t threads) {
  __shared__ int32_t longest, num_seqs;
  if (threadIdx.x == 0) longest = num_seqs = 1;
  __syncthreads();
  for (int64_t i = threadIdx.x + 1; i < s.num_offsets; i += kThreads) {
    const int32_t length = offset_at(s, i) - offset_at(s, i - 1);
    if (length <= 0) continue;
    atomicMax(&longest, length);
    atomicMax(&num_seqs, static_cast<int32_t>(i));
  }
  __syncthreads();
  const auto* grids = static_cast<const DocumentGrid*>(s.dst);
  for (int64_t i = thread; i < s.dst_size; i += threads) {
    const DocumentGrid grid = grids[i];
    const int32_t rows = grid.rows_per_block;
    const unsigned x = rows == 0 ? grid.x : min(grid.x, (longest + rows - 1) / rows);
    const auto error = cudaGraphKernelNodeSetGridDim(static_cast<cudaGraphDeviceNode_t>(grid.node),
                                                     dim3(x, num_seqs, grid.z));
    // It was set once when the bank was sealed. A grid that is too small now would leave documents
    // out without a word.
    CUDA_KERNEL_ASSERT(error == cudaSuccess);
  }
}

__device__ void stage_segment(const Segment& s, bool wide, int64_t thread, int64_t threads) {
  switch (s.kind) {
    case SegmentKind::kCopy:
    case SegmentKind::kRows: {
      const auto kept = [&] {
        if (s.kind == SegmentKind::kCopy) return s.src_size;
        return min(s.src_size, max(*s.end, 0) * s.row_bytes);
      };
      if (wide) {
        copy_and_zero<uint4>(s, kept, thread, threads);
      } else {
        copy_and_zero<uint8_t>(s, kept, thread, threads);
      }
      return;
    }
    case SegmentKind::kOffsets: {
      for (int64_t i = thread; i < s.dst_size; i += threads) {
        static_cast<int32_t*>(s.dst)[i] = offset_at(s, i);
      }
      return;
    }
    case SegmentKind::kMask: {
      const auto* in = static_cast<const bool*>(s.src);
      for (int64_t row = thread; row < s.dst_size; row += threads) {
        static_cast<bool*>(s.dst)[row] =
            row >= *s.end || row >= s.src_size || (in != nullptr && in[row]);
      }
      return;
    }
    case SegmentKind::kCount:
      if (thread == 0) {
        *static_cast<int64_t*>(s.dst) += static_cast<const int32_t*>(s.src)[s.src_size - 1];
      }
      return;
    case SegmentKind::kGrids:
      return set_grids(s, thread, threads);
  }
}

__global__ void stage_segments_kernel(const __grid_constant__ Grid grid) {
  int i = 0;
  while (static_cast<int>(blockIdx.x) >= grid.first_block[i + 1]) ++i;
  const int64_t threads = int64_t{grid.first_block[i + 1] - grid.first_block[i]} * kThreads;
  const int64_t thread =
      int64_t{static_cast<int>(blockIdx.x) - grid.first_block[i]} * kThreads + threadIdx.x;
  stage_segment(grid.segments.at[i], grid.wide[i], thread, threads);
}

bool is_wide(const Segment& s) {
  const auto divides = [](int64_t value) { return value % 16 == 0; };
  return divides(reinterpret_cast<intptr_t>(s.src)) && divides(reinterpret_cast<intptr_t>(s.dst)) &&
         divides(s.src_size) && divides(s.dst_size) && divides(s.row_bytes);
}

__global__ void try_grids(const DocumentGrid* grids, int64_t count, bool* settable) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const DocumentGrid grid = grids[i];
  const auto error =
      cudaGraphKernelNodeSetGridDim(static_cast<cudaGraphDeviceNode_t>(grid.node),
                                    dim3(grid.x, static_cast<unsigned>(grid.num_seqs), grid.z));
  settable[i] = error == cudaSuccess;
}

}  // namespace

void launch_staging(const SegmentList& segments, void* stream) {
  Grid grid;
  grid.segments = segments;
  grid.first_block[0] = 0;
  for (int i = 0; i < segments.count; ++i) {
    const Segment& s = segments.at[i];
    const int64_t blocks = std::clamp<int64_t>((s.dst_size + kBytesPerBlock - 1) / kBytesPerBlock,
                                               1, kMaxBlocksPerSegment);
    grid.first_block[i + 1] = grid.first_block[i] + static_cast<int32_t>(blocks);
    grid.wide[i] = is_wide(s);
  }
  stage_segments_kernel<<<grid.first_block[segments.count], kThreads, 0,
                          static_cast<cudaStream_t>(stream)>>>(grid);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void launch_grid_trial(const void* grids, int64_t count, bool* settable, void* stream) {
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  try_grids<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const DocumentGrid*>(grids), count, settable);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace megagraph
