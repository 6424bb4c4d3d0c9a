// SPDX-License-Identifier: Apache-2.0
// The static tensors between the sites of one capture plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "csrc/bank/capture/main_grad_node.h"
#include "csrc/bank/replay/site.h"

namespace megagraph {

// The boundaries of each site, by index: Note [Capture plan] in megagraph/bank/capture.py. On a GPU
// a pass runs once, and what it hands over becomes a boundary. On the host it runs again in each
// replay, into the buffers of its first run.
class CaptureEdges {
 public:
  // `transient`: of each captured site, its outputs that later passes may overwrite. `gaps`: sites
  // behind which something stays eager; -1 where it comes before the first. `shape`: of the hidden
  // states.
  CaptureEdges(std::map<int, std::set<size_t>> transient, std::set<int> gaps,
               std::vector<int64_t> shape, at::TensorOptions options);

  // Whether a site takes the bank's input as it was given.
  bool is_entry(int site) const { return site == 0 && gaps_.count(-1) == 0; }

  // Inside of a pass. An input is the output before it, if that lies in no gap, and an output's
  // gradient is that of the input behind it.
  at::Tensor input(int site);
  void keep_outputs(int site, const std::vector<at::Tensor>& outputs);
  // Undefined for outputs that have none.
  const std::vector<at::Tensor>& output_grads(int site, const std::vector<bool>& has_grad);
  // Returns where it lies from now on.
  at::Tensor keep_input_grad(int site, const at::Tensor& grad);
  void keep_param_grads(int site, const ParamGrads& arrived);

  // After a pass: returns memory to the pool that others use from now on, transient outputs or
  // gradients that cross a gap.
  void give_back_outputs(int site);
  void give_back_gradients(int site);
  // After the last pass: the slot's pool owns all of it, and the nesting rule guards it.
  void disown();
  // A site's graph, without its passes.
  std::shared_ptr<SiteGraph> graph(int site) const;

 private:
  // The boundaries of the site whose output a site takes where it lies, and of the one that takes
  // its own; null for none.
  const Boundaries* before(int site) const;
  const Boundaries* after(int site) const;
  void keep(std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& values) const;
  at::Tensor boundary(const at::Tensor& buffer) const;
  void to_boundaries(std::vector<at::Tensor>& buffers) const;

  const std::map<int, std::set<size_t>> transient_;
  const std::set<int> gaps_;
  const std::vector<int64_t> shape_;
  const at::TensorOptions options_;
  std::map<int, Boundaries> sites_;
};

}  // namespace megagraph
