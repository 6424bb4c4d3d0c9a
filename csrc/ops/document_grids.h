// SPDX-License-Identifier: Apache-2.0
// Notes which kernels of a capture are launched over the documents of a pack.
//
// Note [Document grids]
// A capture keeps each kernel's grid, and FlashAttention's has an axis of documents and one of
// blocks as far as the longest goes. Captured for a capacity, it starts blocks for documents that
// are not there: with 256 slots of which 10 are used, 1.2 to 4.7 times the time of a pack's own
// grid (an H200, `python -m benchmarks attention`). Since CUDA 12.4 a kernel may set the grid of
// another graph's kernel node; an older driver marks none, and all grids stay. So the nodes that a
// capture launches over documents are marked as such, and what stages a micro-batch's offsets sets
// their grids (csrc/bank/staging/staging.h): as many documents as the last one that is not empty,
// as many blocks as the longest one needs. The blocks left out are those that return at once, since
// their document ends before them: the same bits. The host need not know the documents, and what is
// not staged again stays as it was.
//
// Only captures with a collector mark nodes: a marked node keeps its graph from being instantiated
// twice, which is nobody else's business.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace at {
class Tensor;
}

namespace megagraph {

// The grid of one kernel node: [blocks of the longest document, documents, z]. Lies in device
// memory as well.
struct DocumentGrid {
  void* node;              // the cudaGraphDeviceNode_t
  const void* cu_seqlens;  // which offsets the kernel reads
  uint32_t x, z;           // as captured
  int32_t rows_per_block;  // 0: x stays
  int32_t num_seqs;        // as captured
};

// Collects the grids of one capture, from any thread.
class DocumentGridCollector {
 public:
  // `stream` is a cudaStream_t that captures.
  explicit DocumentGridCollector(void* stream);
  ~DocumentGridCollector();
  DocumentGridCollector(const DocumentGridCollector&) = delete;
  DocumentGridCollector& operator=(const DocumentGridCollector&) = delete;

  std::vector<DocumentGrid> take();

 private:
  const unsigned long long capture_id_;
};

// Runs `launch` on the current stream of the offsets' device, and notes the FlashAttention kernels
// that it launches into a collector's capture.
void launch_over_documents(const at::Tensor& cu_seqlens, int64_t max_seqlen,
                           const std::function<void()>& launch);

}  // namespace megagraph
