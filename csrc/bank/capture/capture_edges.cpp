// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/capture/capture_edges.h"

#include <ATen/Functions.h>

#include <tuple>
#include <utility>

#include "csrc/torch/numerics.h"

namespace megagraph {
CaptureEdges::CaptureEdges(std::map<int, std::set<size_t>> transient, std::set<int> gaps,
                           std::vector<int64_t> shape, at::TensorOptions options)
    : transient_(std::move(transient)),
      gaps_(std::move(gaps)),
      shape_(std::move(shape)),
      options_(options) {
  for (const auto& [site, _] : transient_) sites_[site];
}

const Boundaries* CaptureEdges::before(int site) const {
  const auto found = sites_.find(site - 1);
  return gaps_.count(site - 1) != 0 || found == sites_.end() ? nullptr : &found->second;
}

const Boundaries* CaptureEdges::after(int site) const {
  const auto found = sites_.find(site + 1);
  return gaps_.count(site) != 0 || found == sites_.end() ? nullptr : &found->second;
}

at::Tensor CaptureEdges::input(int site) {
  std::vector<at::Tensor>& inputs = sites_.at(site).inputs;
  if (inputs.empty()) {
    const Unfilled unfilled;
    const Boundaries* from = before(site);
    inputs = from == nullptr ? std::vector<at::Tensor>{at::empty(shape_, options_)} : from->outputs;
  }
  return inputs.at(0);
}

void CaptureEdges::keep_outputs(int site, const std::vector<at::Tensor>& outputs) {
  keep(sites_.at(site).outputs, outputs);
}

const std::vector<at::Tensor>& CaptureEdges::output_grads(int site,
                                                          const std::vector<bool>& has_grad) {
  Boundaries& edges = sites_.at(site);
  if (!edges.grad_outputs.empty()) return edges.grad_outputs;
  if (const Boundaries* to = after(site)) return edges.grad_outputs = to->grad_inputs;
  const Unfilled unfilled;
  for (size_t i = 0; i < edges.outputs.size(); ++i) {
    edges.grad_outputs.push_back(has_grad.at(i) ? at::empty_like(edges.outputs[i]) : at::Tensor());
  }
  return edges.grad_outputs;
}

at::Tensor CaptureEdges::keep_input_grad(int site, const at::Tensor& grad) {
  std::vector<at::Tensor>& grads = sites_.at(site).grad_inputs;
  keep(grads, {grad});
  return grads[0];
}

void CaptureEdges::keep_param_grads(int site, const ParamGrads& arrived) {
  Boundaries& edges = sites_.at(site);
  std::vector<at::Tensor> grads;
  edges.params.clear();
  for (const auto& [param, grad] : arrived) {
    edges.params.push_back(param);
    grads.push_back(grad);
  }
  keep(edges.param_grads, grads);
}

void CaptureEdges::give_back_outputs(int site) {
  std::vector<at::Tensor>& outputs = sites_.at(site).outputs;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (transient_.at(site).count(i) != 0) outputs[i] = boundary(outputs[i]);
  }
}

void CaptureEdges::give_back_gradients(int site) {
  Boundaries& edges = sites_.at(site);
  if (after(site) == nullptr) to_boundaries(edges.grad_outputs);
  if (!is_entry(site) && before(site) == nullptr) to_boundaries(edges.grad_inputs);
}

void CaptureEdges::disown() {
  // Sites share boundaries. Gaps let other tensors lie at one address.
  std::map<std::tuple<void*, std::vector<int64_t>, at::ScalarType>, at::Tensor> aliases;
  for (auto& [_, edges] : sites_) {
    edges.grad_outputs.resize(edges.outputs.size());
    edges.grad_inputs.resize(edges.inputs.size());
    for (auto* tensors : {&edges.inputs, &edges.outputs, &edges.param_grads, &edges.grad_outputs,
                          &edges.grad_inputs}) {
      for (at::Tensor& tensor : *tensors) {
        if (!tensor.defined()) continue;
        at::Tensor& alias =
            aliases[{tensor.data_ptr(), tensor.sizes().vec(), tensor.scalar_type()}];
        if (!alias.defined()) alias = boundary(tensor);
        tensor = alias;
      }
    }
  }
}

std::shared_ptr<SiteGraph> CaptureEdges::graph(int site) const {
  auto graph = std::make_shared<SiteGraph>();
  graph->boundaries = sites_.at(site);
  graph->is_entry = is_entry(site);
  graph->is_chained = before(site) != nullptr;
  for (size_t i = 0; i < graph->boundaries.outputs.size(); ++i) {
    graph->is_transient.push_back(transient_.at(site).count(i) != 0);
  }
  return graph;
}

void CaptureEdges::keep(std::vector<at::Tensor>& buffers,
                        const std::vector<at::Tensor>& values) const {
  const bool is_first = buffers.empty();
  TORCH_INTERNAL_ASSERT(is_first || options_.device().is_cpu(), "captured work runs once");
  TORCH_INTERNAL_ASSERT(is_first || buffers.size() == values.size(), "another number of tensors");
  for (size_t i = 0; i < values.size(); ++i) {
    const at::Tensor value = values[i].detach();
    if (!is_first) {
      buffers[i].copy_(value);
    } else if (options_.device().is_cpu()) {
      buffers.push_back(value.clone(at::MemoryFormat::Contiguous));
    } else {
      buffers.push_back(value.contiguous());
    }
  }
}

// The same memory, which the pool owns, by a tensor that does not.
at::Tensor CaptureEdges::boundary(const at::Tensor& buffer) const {
  if (!buffer.defined() || options_.device().is_cpu()) return buffer;
  // Of an empty one torch could not ask the driver where its memory is.
  return at::for_blob(buffer.data_ptr(), buffer.sizes())
      .strides(buffer.strides())
      .options(buffer.options().requires_grad(false))
      .target_device(buffer.device())
      .make_tensor();
}

void CaptureEdges::to_boundaries(std::vector<at::Tensor>& buffers) const {
  for (at::Tensor& buffer : buffers) buffer = boundary(buffer);
}

}  // namespace megagraph
