// SPDX-License-Identifier: Apache-2.0
// The gradient accumulator of a parameter: torch's sink node, which can be exchanged, and its
// hooks.
//
// No release differs, but for who owns a node (csrc/torch/nodes.h). The accumulator of a tensor is
// held weakly: whoever sets one keeps it alive. Hooks that were registered from Python lie together
// in one hook's dictionary, whose type is known by name only: libtorch_python does not export it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "csrc/torch/nodes.h"

namespace megagraph {

using AccumulatorPtr = NodePtr<torch::autograd::Node>;

// Null while the parameter has none; none is made.
AccumulatorPtr accumulator_of(const at::Tensor& param);

// Null takes it away.
void set_accumulator(const at::Tensor& param, const AccumulatorPtr& accumulator);

// Where a gradient of `tensor` goes; the accumulator of a leaf is made here.
torch::autograd::Edge gradient_edge_of(const at::Tensor& tensor);

// Whether the edge leads to a leaf's accumulator of torch's own.
bool is_leaf_edge(const torch::autograd::Edge& edge);

// Whether the edge leads to a leaf that holds a gradient, to which another one is added.
bool has_gradient(const torch::autograd::Edge& edge);

// How many hooks a parameter's accumulator has, which a site would bypass. DDP's own counts as one;
// those on the tensor itself are not counted. Needs the GIL.
int64_t count_accumulator_hooks(const at::Tensor& param);

}  // namespace megagraph
