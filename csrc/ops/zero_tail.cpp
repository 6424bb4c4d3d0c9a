// SPDX-License-Identifier: Apache-2.0
// Changes the number of physical rows and zeroes the tail: rows at or past cu_seqlens[-1] are zero
// in the result, whatever the input holds there, and receive a zero gradient. zero_tail_ does the
// second half in place.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "csrc/ops/checks.h"
#include "csrc/torch/version_counter.h"
#ifdef MEGAGRAPH_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "csrc/ops/kernels.h"
#endif

namespace megagraph {
namespace {

at::Tensor zero_tail_meta(const at::Tensor& x, const at::Tensor& cu_seqlens, c10::SymInt tokens) {
  check_cu_seqlens(cu_seqlens, "zero_tail");
  check_same_device(x, cu_seqlens, "zero_tail");
  TORCH_CHECK_VALUE(x.dim() >= 1, "zero_tail: x must have a token dimension");
  TORCH_CHECK_VALUE(tokens >= 0, "zero_tail: tokens must not be negative, got ", tokens);
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes[0] = tokens;
  return at::empty_symint(sizes, x.options());
}

at::Tensor zero_tail_cpu(const at::Tensor& x, const at::Tensor& cu_seqlens, int64_t tokens) {
  at::Tensor out = zero_tail_meta(x, cu_seqlens, tokens);
  if (out.numel() == 0) return out;
  const at::Tensor rows = x.contiguous();
  const int64_t end = cu_seqlens.const_data_ptr<int32_t>()[cu_seqlens.numel() - 1];
  const int64_t valid = std::min({std::max<int64_t>(end, 0), tokens, x.size(0)});
  const size_t row_bytes = out.nbytes() / tokens;
  auto* data = static_cast<char*>(out.mutable_data_ptr());
  std::memcpy(data, rows.const_data_ptr(), valid * row_bytes);
  std::memset(data + valid * row_bytes, 0, (tokens - valid) * row_bytes);
  return out;
}

constexpr size_t kMostInPlace = 4;  // a kernel gets that many

void zero_tail_inplace_meta(at::TensorList xs, const at::Tensor& cu_seqlens) {
  check_cu_seqlens(cu_seqlens, "zero_tail_");
  TORCH_CHECK_VALUE(xs.size() <= kMostInPlace, "zero_tail_: at most ", kMostInPlace,
                    " tensors a call, got ", xs.size());
  for (const at::Tensor& x : xs) {
    TORCH_CHECK_VALUE(x.dim() >= 1 && x.is_contiguous(),
                      "zero_tail_: tensors must be contiguous and have a token dimension");
    check_same_device(x, cu_seqlens, "zero_tail_");
  }
}

void zero_tail_inplace_cpu(at::TensorList xs, const at::Tensor& cu_seqlens) {
  zero_tail_inplace_meta(xs, cu_seqlens);
  const int64_t end = cu_seqlens.const_data_ptr<int32_t>()[cu_seqlens.numel() - 1];
  for (const at::Tensor& x : xs) {
    if (x.numel() == 0) continue;
    const int64_t valid = std::clamp<int64_t>(end, 0, x.size(0));
    const size_t row_bytes = x.nbytes() / x.size(0);
    std::memset(static_cast<char*>(x.mutable_data_ptr()) + valid * row_bytes, 0,
                (x.size(0) - valid) * row_bytes);
  }
}

at::Tensor call_zero_tail(const at::Tensor& x, const at::Tensor& cu_seqlens, c10::SymInt tokens) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("megagraph::zero_tail", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymInt)>();
  return op.call(x, cu_seqlens, tokens);
}

// The map is its own adjoint up to the number of rows.
class ZeroTail : public torch::autograd::Function<ZeroTail> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& cu_seqlens, c10::SymInt tokens) {
    at::AutoDispatchBelowADInplaceOrView guard;
    at::Tensor out = call_zero_tail(x, cu_seqlens, tokens);
    ctx->save_for_backward({cu_seqlens});
    ctx->saved_data["rows"] = x.sym_size(0);
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const at::Tensor cu_seqlens = ctx->get_saved_variables()[0];
    return {call_zero_tail(grads[0], cu_seqlens, ctx->saved_data["rows"].toSymInt()), at::Tensor(),
            at::Tensor()};
  }
};

at::Tensor zero_tail_autograd(const at::Tensor& x, const at::Tensor& cu_seqlens,
                              c10::SymInt tokens) {
  const bool has_history = at::GradMode::is_enabled() && x.requires_grad();
  // A node costs as much as the op itself. It also says that there is no forward mode.
  if (has_history || x._fw_grad(/*level=*/0).defined()) {
    return ZeroTail::apply(x, cu_seqlens, tokens);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_zero_tail(x, cu_seqlens, tokens);
}

void zero_tail_inplace_autograd(at::TensorList xs, const at::Tensor& cu_seqlens) {
  for (const at::Tensor& x : xs) {
    TORCH_CHECK(!(at::GradMode::is_enabled() && x.requires_grad()),
                "zero_tail_ writes in place and has no backward: use zero_tail for a tensor that "
                "requires grad");
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("megagraph::zero_tail_", "")
                             .typed<void(at::TensorList, const at::Tensor&)>();
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.call(xs, cu_seqlens);
  }
  for (const at::Tensor& x : xs) note_write(x);
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CPU, m) {
  m.impl("zero_tail", zero_tail_cpu);
  m.impl("zero_tail_", zero_tail_inplace_cpu);
}
TORCH_LIBRARY_IMPL(megagraph, Meta, m) {
  m.impl("zero_tail", zero_tail_meta);
  m.impl("zero_tail_", zero_tail_inplace_meta);
}
TORCH_LIBRARY_IMPL(megagraph, Autograd, m) {
  m.impl("zero_tail", zero_tail_autograd);
  m.impl("zero_tail_", zero_tail_inplace_autograd);
}

#ifdef MEGAGRAPH_WITH_CUDA
namespace {

const int32_t* last_offset(const at::Tensor& cu_seqlens) {
  return cu_seqlens.const_data_ptr<int32_t>() + cu_seqlens.numel() - 1;
}

at::Tensor zero_tail_cuda(const at::Tensor& x, const at::Tensor& cu_seqlens, int64_t tokens) {
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor out = zero_tail_meta(x, cu_seqlens, tokens);
  if (out.numel() == 0) return out;
  const at::Tensor rows = x.contiguous();
  copy_rows_zero_tail(rows.const_data_ptr(), x.size(0), out.mutable_data_ptr(), tokens,
                      static_cast<int64_t>(out.nbytes()) / tokens, last_offset(cu_seqlens),
                      c10::cuda::getCurrentCUDAStream());
  return out;
}

void zero_tail_inplace_cuda(at::TensorList xs, const at::Tensor& cu_seqlens) {
  static_assert(kMostInPlace == kMaxTailTensors);
  zero_tail_inplace_meta(xs, cu_seqlens);
  Tails tails{};
  for (const at::Tensor& x : xs) {
    if (x.numel() == 0) continue;
    tails.data[tails.count] = x.mutable_data_ptr();
    tails.rows[tails.count] = x.size(0);
    tails.row_bytes[tails.count] = static_cast<int64_t>(x.nbytes()) / x.size(0);
    ++tails.count;
  }
  const c10::cuda::CUDAGuard guard(cu_seqlens.device());
  zero_tails(tails, last_offset(cu_seqlens), c10::cuda::getCurrentCUDAStream());
}

}  // namespace

TORCH_LIBRARY_IMPL(megagraph, CUDA, m) {
  m.impl("zero_tail", zero_tail_cuda);
  m.impl("zero_tail_", zero_tail_inplace_cuda);
}
#endif

}  // namespace megagraph
