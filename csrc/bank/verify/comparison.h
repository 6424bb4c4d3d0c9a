// SPDX-License-Identifier: Apache-2.0
// Compares what a graph has made with runs of its module, and says which tensors differ.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/bank/verify/kept_state.h"
#include "csrc/bank/verify/runs.h"

namespace megagraph {

// A tensor of a site that its graph and its module make differently.
struct Difference {
  int64_t slot, index;  // the second of the site
  std::string tensor;   // what differs, in words
  Misfit misfit;
  bool is_noisy = false;     // runs of the module differ in this tensor
  bool is_rounding = false;  // as small and rare as what adding with atomics makes of one call

  // Whether it may not recur in further verifications, having recurred in `times` of them: of
  // hundreds of tensors some differ by chance in two verifications, hardly any in four.
  bool may_be_chance(int times) const { return (is_rounding || is_noisy) && times < 3; }
  std::string in_words() const;
};

class Comparison {
 public:
  // With the module's first run.
  Comparison(const NamedTensors& graph, const NamedTensors& module);
  Comparison(const Comparison&) = delete;
  Comparison& operator=(const Comparison&) = delete;

  void add(const NamedTensors& module);
  // Whether a further run of the module may excuse the graph. That takes a few runs, and many where
  // they differ, but not yet in some tensor in which the graph does.
  bool is_open();
  // Whether runs of the module differ in some tensor as the graph does.
  bool lies_within() { return unlike().size() < ranges_.size(); }
  // Of a site in a slot.
  std::vector<Difference> differences(int64_t slot, int64_t index);

 private:
  struct Range {
    std::string name;
    at::Tensor graph;
    RunRange runs;  // of the module
  };
  struct Unlike {
    const Range* range;
    Misfit misfit;
  };

  const std::vector<Unlike>& unlike();

  int num_runs_ = 1;
  std::vector<std::string> lone_;  // what one of them alone has made
  std::vector<Range> ranges_;      // of what differs in the first run
  std::optional<std::vector<Unlike>> unlike_;
};

}  // namespace megagraph
