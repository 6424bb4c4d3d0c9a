// SPDX-License-Identifier: Apache-2.0
#include "csrc/ops/document_grids.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <mutex>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "csrc/torch/cuda_streams.h"
#include "csrc/torch/numerics.h"

namespace megagraph {
namespace {

std::mutex mutex;
std::map<unsigned long long, std::vector<DocumentGrid>> collected;  // by the capture's id

bool is_collecting(unsigned long long capture_id) {
  const std::lock_guard<std::mutex> lock(mutex);
  return collected.count(capture_id) != 0;
}

// How many rows of the longest document a block of the grid's first axis takes; 0 where that cannot
// be told for sure. With 8 blocks or more, no two sizes that are powers of two and none between
// them give the same number of blocks.
int32_t rows_per_block(unsigned blocks, int64_t max_seqlen) {
  if (blocks < 8) return 0;
  for (const int32_t rows : {32, 64, 128, 256}) {
    if ((max_seqlen + rows - 1) / rows == blocks) return rows;
  }
  return 0;
}

// Answers whether the node is now one whose grid a kernel may set.
bool mark(cudaGraphNode_t node, void** device_node) {
  cudaLaunchAttributeValue value{};
  value.deviceUpdatableKernelNode.deviceUpdatable = 1;
  constexpr auto kAttribute = cudaLaunchAttributeDeviceUpdatableKernelNode;
  if (cudaGraphKernelNodeSetAttribute(node, kAttribute, &value) != cudaSuccess ||
      cudaGraphKernelNodeGetAttribute(node, kAttribute, &value) != cudaSuccess) {
    return false;
  }
  *device_node = value.deviceUpdatableKernelNode.devNode;
  return *device_node != nullptr;
}

// FlashAttention 2 launches [blocks, documents, heads]. Split over keys it has another grid.
bool is_over_documents(const cudaKernelNodeParams& params, int64_t num_seqs) {
  const char* name = nullptr;
  if (params.gridDim.y != num_seqs || cudaFuncGetName(&name, params.func) != cudaSuccess) {
    return false;
  }
  const std::string_view text(name);
  const auto has = [&](const char* part) { return text.find(part) != std::string_view::npos; };
  return (has("flash_fwd_kernel") || has("flash_bwd_")) && !has("splitkv");
}

// In deterministic mode each block of this kernel's first axis sums into a buffer of its own, so
// their number belongs to the bits.
bool must_keep_blocks(const cudaKernelNodeParams& params) {
  const char* name = nullptr;
  return uses_deterministic_algorithms() && cudaFuncGetName(&name, params.func) == cudaSuccess &&
         std::string_view(name).find("seqk_parallel") != std::string_view::npos;
}

unsigned long long id_of(void* stream) {
  const auto capturing = capturing_of(static_cast<cudaStream_t>(stream));
  TORCH_CHECK(capturing.has_value(), "expected a stream that captures");
  return capturing->id;
}

}  // namespace

DocumentGridCollector::DocumentGridCollector(void* stream) : capture_id_(id_of(stream)) {
  const std::lock_guard<std::mutex> lock(mutex);
  collected[capture_id_];
}

DocumentGridCollector::~DocumentGridCollector() { take(); }

std::vector<DocumentGrid> DocumentGridCollector::take() {
  const std::lock_guard<std::mutex> lock(mutex);
  auto node = collected.extract(capture_id_);
  return node.empty() ? std::vector<DocumentGrid>() : std::move(node.mapped());
}

void launch_over_documents(const at::Tensor& cu_seqlens, int64_t max_seqlen,
                           const std::function<void()>& launch) {
  const auto stream = c10::cuda::getCurrentCUDAStream(cu_seqlens.device().index());
  const auto capturing = capturing_of(stream);
  const int64_t num_seqs = cu_seqlens.numel() - 1;
  if (!capturing || num_seqs < 2 || !is_collecting(capturing->id)) return launch();

  const std::vector<cudaGraphNode_t> nodes_before = capturing->nodes();
  const std::unordered_set<cudaGraphNode_t> before(nodes_before.begin(), nodes_before.end());
  launch();
  std::vector<DocumentGrid> found;
  for (cudaGraphNode_t node : capturing->nodes()) {
    cudaGraphNodeType type{};
    cudaKernelNodeParams params{};
    if (before.count(node) != 0 || cudaGraphNodeGetType(node, &type) != cudaSuccess ||
        type != cudaGraphNodeTypeKernel ||
        cudaGraphKernelNodeGetParams(node, &params) != cudaSuccess ||
        !is_over_documents(params, num_seqs)) {
      continue;
    }
    DocumentGrid grid{};
    if (!mark(node, &grid.node)) continue;
    grid.cu_seqlens = cu_seqlens.const_data_ptr();
    grid.x = params.gridDim.x;
    grid.z = params.gridDim.z;
    grid.num_seqs = static_cast<int32_t>(num_seqs);
    grid.rows_per_block = must_keep_blocks(params) ? 0 : rows_per_block(grid.x, max_seqlen);
    found.push_back(grid);
  }
  static_cast<void>(cudaGetLastError());  // of a kernel that could not be read: its grid stays
  const std::lock_guard<std::mutex> lock(mutex);
  auto& all = collected[capturing->id];
  all.insert(all.end(), found.begin(), found.end());
}

}  // namespace megagraph
