// SPDX-License-Identifier: Apache-2.0
// Compares tensors: whether they have the same bits, how far they are apart, and whether one is a
// run like others.
//
// Note [A run like others]
// Kernels that add with atomics make other bits in each run. So a graph is right if it is one run
// more of the module, and every entry is judged by what the module's own runs have made of it.
// Sizes differ by orders of magnitude inside of one tensor (the rows of a busy expert and of an
// idle one), and one spread for all of it would let a graph lose the small ones. Therefore
//
// - an entry that differs between runs may lie outside of what they made of it, by four times its
//   own spread, or by twice that of entries that are no larger, if that is no more than twice the
//   spread of its row (of 64 entries that lie together, where rows are shorter);
// - an entry that is the same in all runs has to be the same in the graph. Yet each run moves a few
//   for the first time. The graph may move a few of a large tensor, each by a rounding of its own
//   or twice the spread of entries that are no larger, and by little beside the largest one of its
//   row. If later runs still move some, it may move as many as all of them have, since it may add
//   in more orders than calls that follow one another do; and a few of these by little alone: a
//   sum that cancels is rounded as its terms are;
// - an entry that is infinite or no number in the graph is so in some run, and one that is so in
//   all runs is so in the graph. It excuses nothing else; nor do runs of several shapes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace megagraph {

// Whether any bit of a tensor is set: it is not all positive zeros.
bool has_bits(const at::Tensor& tensor);
// Whether two tensors have the same shape, type and bits; two of the same NaN do.
bool have_same_bits(const at::Tensor& one, const at::Tensor& other);
// The largest one over all entries; infinite where shapes differ or one alone is no number.
double distance(const at::Tensor& one, const at::Tensor& other);

// What a run has made that is not like others.
struct Misfit {
  double off;     // how far it is, at most, from that of the others that it is furthest from
  double spread;  // how far these are apart, at most, where it misses them
};

// What several runs have made of one tensor, in the memory of two: Note [A run like others].
class RunRange {
 public:
  explicit RunRange(const at::Tensor& first);

  void add(const at::Tensor& run);
  // Whether runs have different bits.
  bool is_noisy() const { return is_noisy_; }
  // How far apart any two runs are; infinite where that cannot be told.
  double spread() const;
  // Whether another run differs from the least of these by nothing but roundings: in few entries,
  // and there by little beside the largest of all entries.
  bool differs_as_rounded(const at::Tensor& other) const;
  // Where another run is not as near to these, entry by entry, as one more may be; null: nowhere.
  std::optional<Misfit> misfit(const at::Tensor& other) const;

 private:
  // Entries that were the same in all runs and that a graph may move, and those of them that may
  // go further than others of their size.
  struct Allowance {
    int64_t move, stray;
  };

  bool is_alike(const at::Tensor& run) const;
  Allowance allowance() const;
  at::Tensor spread_by_size() const;

  const std::vector<int64_t> shape_;
  const at::ScalarType type_;
  bool is_noisy_ = false;
  bool are_alike_ = true;       // all runs, in shape and type
  at::Tensor first_;            // as long as none was another
  at::Tensor met_;              // all that each entry was; undefined: finite in all of them
  at::Tensor least_, most_;     // where they are finite; NaN where none is
  std::vector<int64_t> moved_;  // by each run: entries that were the same until then
};

}  // namespace megagraph
