// SPDX-License-Identifier: Apache-2.0
// The kernels behind the ops' CUDA side. No torch headers: a .cu file that includes them compiles
// ten times slower. The callers check shapes, set the device and allocate.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "csrc/ops/rope_rotation.h"

namespace megagraph {

// out[i] = in[i] for i < given, else `end` (or in[given - 1] if there is none).
void pad_offsets(const int32_t* in, int64_t given, int32_t* out, int64_t total, const int32_t* end,
                 cudaStream_t stream);

void partition_rows(const int32_t* cu_seqlens, int32_t num_seqs, int32_t* out, int32_t rows,
                    int32_t total_tokens, int32_t cp_size, int32_t cp_rank, cudaStream_t stream);

// out[0] and out[1] are [total_tokens] each, csrc/ops/thd_context.h.
void gathered_rows(const int32_t* cu_seqlens, int32_t num_seqs, int32_t* out, int32_t total_tokens,
                   int32_t cp_size, cudaStream_t stream);

struct ContextKeys {
  const int32_t* cu_seqlens;
  int32_t* queries;  // [2 * num_seqs + 1], and so is `seen`
  int32_t* seen;
  int32_t* keys;    // [num_keys]
  int32_t* places;  // [2, total_tokens]
  int32_t num_seqs, num_keys, total_tokens, cp_size, cp_rank;
};
void context_keys(const ContextKeys& maps, cudaStream_t stream);

constexpr int kMaxTailTensors = 4;
struct Tails {
  void* data[kMaxTailTensors];
  int64_t rows[kMaxTailTensors];
  int64_t row_bytes[kMaxTailTensors];
  int count;
};
// `end` points to the last offset, on the device.
void zero_tails(const Tails& tails, const int32_t* end, cudaStream_t stream);
void copy_rows_zero_tail(const void* in, int64_t in_rows, void* out, int64_t out_rows,
                         int64_t row_bytes, const int32_t* end, cudaStream_t stream);

constexpr int kMaxRopeTensors = 4;
struct RopeArgs {
  const void* in[kMaxRopeTensors];
  void* out[kMaxRopeTensors];
  int64_t in_token_stride[kMaxRopeTensors];  // in elements
  int64_t in_head_stride[kMaxRopeTensors];
  int32_t first_head[kMaxRopeTensors + 1];  // heads of all tensors, counted through
  int32_t dim[kMaxRopeTensors];
  const void* cos;
  const void* sin;
  const int32_t* cu_seqlens;
  int32_t num_tensors, tokens, num_seqs, positions, rotary_dim, cp_size, cp_rank;
};
void rope_thd(const RopeArgs& args, RopeScalar scalar, RopeLayout layout, bool backward,
              cudaStream_t stream);

// [tokens, heads, dim], whose last dimension is dense; strides in elements. No heads: not there.
struct RopeMlaView {
  void* data;
  int64_t token_stride, head_stride;
  int32_t heads, dim;
};
// Forward from kv and k_pe to k and v, backward the other way; q to q_out, which may be q.
struct RopeMlaArgs {
  RopeMlaView q, q_out, kv, k_pe, k, v;
  const void* cos;
  const void* sin;
  const int32_t* cu_seqlens;
  int32_t tokens, num_seqs, positions, rotary_dim, cp_size, cp_rank;
};
void rope_mla(const RopeMlaArgs& args, RopeScalar scalar, bool backward, cudaStream_t stream);

}  // namespace megagraph
