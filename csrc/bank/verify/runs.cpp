// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/verify/runs.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

namespace megagraph {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Of as many runs that all differ, any one is in the pair that lies furthest apart with a chance of
// 1 in 3.
constexpr int kSpreads = 2;
// Of an entry, by itself: for as many as there are, chance makes of few runs a small spread.
constexpr int kOwnSpreads = 4;
// What an order of additions changes, where few of them are in another order: entries, and of the
// largest one.
constexpr double kFew = 1e-2, kRounding = 0x1p-6;
constexpr int64_t kFewest = 8;    // entries that count as few in a large tensor
constexpr int64_t kLongRow = 64;  // entries that tell how far others beside them may go
// Entries that are compared at once, since doubles of all of them would take much memory.
constexpr int64_t kPiece = int64_t{1} << 19;
constexpr int64_t kLeastExponent = -1075, kMostExponent = 1025;  // of doubles; the first is zero's

// What an entry is in a run: each is a bit, so that several runs have several.
constexpr int kFinite = 1, kNan = 2, kInfinite = 4, kBelow = 8;

at::Tensor real_parts(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
}

at::Tensor bits_of(const at::Tensor& tensor) {
  const at::Tensor numbers = real_parts(tensor).resolve_neg();
  if (!numbers.is_floating_point()) return numbers;
  switch (numbers.element_size()) {
    case 1:
      return numbers.contiguous().view(at::kByte);
    case 2:
      return numbers.contiguous().view(at::kShort);
    case 4:
      return numbers.contiguous().view(at::kInt);
    case 8:
      return numbers.contiguous().view(at::kLong);
    default:
      return numbers;
  }
}

// The same as a type that has minima.
at::Tensor numbers_of(const at::Tensor& tensor) {
  if (tensor.is_complex()) return real_parts(tensor);
  if (!tensor.is_floating_point()) return tensor.to(at::kLong);
  return tensor.element_size() == 1 ? tensor.to(at::kFloat) : tensor;
}

// Calls `use` with some rows at a time of tensors of one shape, each as [rows, entries of a row].
// Entries that lie together count as one row where rows are short, and a part of a row where they
// are long.
template <typename Use>
void for_each_piece(const std::vector<at::Tensor>& tensors, const Use& use) {
  const int64_t count = tensors[0].numel();
  if (count == 0) return;
  int64_t width = tensors[0].dim() > 0 ? tensors[0].size(-1) : 1;
  if (width < kLongRow) width *= (kLongRow + width - 1) / width;
  width = std::min(width, kPiece);
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape(-1));
  const auto take = [&](int64_t first, int64_t end, int64_t columns) {
    std::vector<at::Tensor> piece;
    for (const at::Tensor& tensor : flat) {
      piece.push_back(tensor.slice(0, first, end).view({-1, columns}));
    }
    use(piece);
  };
  const int64_t whole = count - count % width,
                at_once = std::max<int64_t>(1, kPiece / width) * width;
  for (int64_t first = 0; first < whole; first += at_once) {
    take(first, std::min(whole, first + at_once), width);
  }
  if (whole < count) take(whole, count, count - whole);
}

// Of each entry what it is; undefined where all are finite.
at::Tensor kinds_of(const at::Tensor& numbers) {
  if (!numbers.is_floating_point() || at::isfinite(numbers).all().item<bool>()) return {};
  at::Tensor kinds = at::full(numbers.sizes(), kFinite, numbers.options().dtype(at::kByte));
  kinds.masked_fill_(at::isnan(numbers), kNan);
  kinds.masked_fill_(at::isposinf(numbers), kInfinite);
  return kinds.masked_fill_(at::isneginf(numbers), kBelow);
}

at::Tensor kinds_or_finite(const at::Tensor& kinds, const at::Tensor& like) {
  if (kinds.defined()) return kinds;
  return at::full(like.sizes(), kFinite, like.options().dtype(at::kByte));
}

// A copy with NaN for what is infinite, which minima pass over.
at::Tensor finite_of(const at::Tensor& numbers) {
  if (!numbers.is_floating_point()) return numbers.clone();
  return numbers.masked_fill(at::isinf(numbers), std::numeric_limits<double>::quiet_NaN());
}

// How far entries are apart, in doubles; infinite where that is no number.
at::Tensor apart(const at::Tensor& one, const at::Tensor& other) {
  // Whole numbers may have more digits than doubles.
  if (!one.is_floating_point()) return (one - other).abs().to(at::kDouble);
  at::Tensor off = (one.to(at::kDouble) - other.to(at::kDouble)).abs();
  return off.nan_to_num_(kInfinity, kInfinity);
}

// How far runs are apart and how large, of each entry, in doubles; zero where none is finite.
std::pair<at::Tensor, at::Tensor> spread_and_size(const at::Tensor& least, const at::Tensor& most) {
  at::Tensor size = at::maximum(least.to(at::kDouble).abs(), most.to(at::kDouble).abs());
  return {apart(most, least).masked_fill_(least != least, 0.0), size.nan_to_num_(0.0)};
}

// The place of each size among powers of two; the first one is that of zero.
at::Tensor exponent_of(const at::Tensor& size) {
  const at::Tensor exponent = std::get<1>(at::frexp(size)).to(at::kLong);
  return exponent.masked_fill(size == 0, kLeastExponent) - kLeastExponent;
}

// The largest of some values, none of which is negative; -1 for none.
double largest_where(const at::Tensor& chosen, const at::Tensor& values) {
  return values.masked_fill(chosen.logical_not(), -1.0).max().item<double>();
}

double rounding_of(const at::Tensor& numbers) {
  switch (numbers.scalar_type()) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kFloat:
      return std::numeric_limits<float>::epsilon();
    case at::kHalf:
      return 0x1p-10;
    case at::kBFloat16:
      return 0x1p-7;
    default:
      return 0.0;
  }
}

// How many entries, and how far they are off at most.
struct Entries {
  int64_t count = 0;
  double off = -1.0;

  void add(const Entries& others) {
    count += others.count;
    off = std::max(off, others.off);
  }
};

// Entries of a run: those that may not be what they are; those that no other run has moved; and of
// these the ones that lie further off than entries of their size do.
struct Judged {
  Misfit misfit{-1.0, -1.0};
  Entries moved, strayed;

  void add(const Judged& others) {
    misfit.off = std::max(misfit.off, others.misfit.off);
    misfit.spread = std::max(misfit.spread, others.misfit.spread);
    moved.add(others.moved);
    strayed.add(others.strayed);
  }
};

// Judges some rows of a run: `piece` is the least and the most of other runs, this one, and where
// any is not finite what its entries are and all that they are in other runs. `by_size`: the
// largest spread of entries up to each power of two.
Judged judge(const at::Tensor& by_size, const std::vector<at::Tensor>& piece) {
  const at::Tensor &least = piece[0], &most = piece[1], &other = piece[2];
  const auto [spread, size] = spread_and_size(least, most);
  at::Tensor is_inside = (least <= other).logical_and(other <= most);
  if (piece.size() > 3) {
    const at::Tensor &kinds = piece[3], &met = piece[4];
    is_inside = is_inside.logical_or((kinds > kFinite).logical_and((kinds & met) > 0));
  }
  const at::Tensor is_steady = least == most;
  const at::Tensor off = at::maximum(apart(other, least), apart(other, most));
  const at::Tensor may_be_off = by_size.take(exponent_of(size)) * kSpreads;
  const at::Tensor little = size.amax(1, true) * kRounding;
  const at::Tensor of_its_size = at::maximum(may_be_off, size * rounding_of(least));
  at::Tensor of_others = may_be_off;
  if (least.size(1) >= kLongRow) {
    of_others = at::minimum(of_others, spread.amax(1, true) * kSpreads);
  }
  of_others = at::maximum(of_others, spread * kOwnSpreads);
  const at::Tensor is_wrong =
      is_inside.logical_or(off <= at::where(is_steady, little, of_others)).logical_not();
  const at::Tensor is_moved = is_steady.logical_and(is_inside.logical_not());
  const auto entries = [&](const at::Tensor& chosen) {
    return Entries{chosen.sum().item<int64_t>(), largest_where(chosen, off)};
  };
  return {{largest_where(is_wrong, off), largest_where(is_wrong, spread)},
          entries(is_moved),
          entries(is_moved.logical_and(off > of_its_size))};
}

}  // namespace

bool has_bits(const at::Tensor& tensor) { return bits_of(tensor).any().item<bool>(); }

bool have_same_bits(const at::Tensor& one, const at::Tensor& other) {
  return one.sizes() == other.sizes() && one.scalar_type() == other.scalar_type() &&
         bits_of(one).equal(bits_of(other));
}

double distance(const at::Tensor& one, const at::Tensor& other) {
  if (one.sizes() != other.sizes()) return kInfinity;
  double largest = 0.0;
  for_each_piece({one, other}, [&](const std::vector<at::Tensor>& piece) {
    const at::Tensor both_nan = at::isnan(piece[0]).logical_and(at::isnan(piece[1]));
    const at::Tensor is_same = (piece[0] == piece[1]).logical_or(both_nan);
    const at::Tensor off = (piece[0].to(at::kDouble) - piece[1].to(at::kDouble)).abs();
    const auto found = off.masked_fill(is_same, 0.0).max().item<double>();
    largest = std::max(largest, std::isnan(found) ? kInfinity : found);
  });
  return largest;
}

RunRange::RunRange(const at::Tensor& first)
    : shape_(first.sizes().vec()), type_(first.scalar_type()), moved_{0} {
  const at::NoGradGuard no_grad;
  first_ = first.clone();
  const at::Tensor numbers = numbers_of(first_);
  met_ = kinds_of(numbers);
  least_ = most_ = finite_of(numbers).contiguous();
}

bool RunRange::is_alike(const at::Tensor& run) const {
  return run.sizes() == at::IntArrayRef(shape_) && run.scalar_type() == type_;
}

void RunRange::add(const at::Tensor& run) {
  const at::NoGradGuard no_grad;
  are_alike_ = are_alike_ && is_alike(run);
  if (!are_alike_) {
    is_noisy_ = true;
    return;
  }
  if (!is_noisy_) {
    if (have_same_bits(run, first_)) {
      moved_.push_back(0);
      return;
    }
    is_noisy_ = true;
    most_ = least_.clone();
    first_.reset();
  }
  const at::Tensor numbers = numbers_of(run), kinds = kinds_of(numbers);
  if (kinds.defined() || met_.defined()) {
    met_ = kinds_or_finite(met_, numbers) | kinds_or_finite(kinds, numbers);
  }
  const at::Tensor finite = finite_of(numbers);
  int64_t moved = 0;
  for_each_piece({least_, most_, finite}, [&](const std::vector<at::Tensor>& piece) {
    const at::Tensor is_steady = piece[0] == piece[1], is_finite = piece[2] == piece[2];
    const at::Tensor is_moved = is_steady.logical_and(piece[2] != piece[0]).logical_and(is_finite);
    moved += is_moved.sum().item<int64_t>();
  });
  moved_.push_back(moved);
  at::fmin_out(least_, least_, finite);
  at::fmax_out(most_, most_, finite);
}

double RunRange::spread() const {
  const bool has_several = met_.defined() && (met_ & (met_ - 1)).any().item<bool>();
  return are_alike_ && !has_several ? distance(least_, most_) : kInfinity;
}

bool RunRange::differs_as_rounded(const at::Tensor& other) const {
  const at::Tensor numbers = numbers_of(other);
  if (numbers.sizes() != least_.sizes() || !numbers.is_floating_point()) return false;
  const int64_t count = numbers.numel();
  const int64_t most_entries = std::max(kFewest, static_cast<int64_t>(kFew * count));
  const double most = count > 0 ? kRounding * numbers.abs().max().item<double>() : 0.0;
  return (numbers != least_).sum().item<int64_t>() <= most_entries &&
         distance(numbers, least_) <= most;
}

std::optional<Misfit> RunRange::misfit(const at::Tensor& other) const {
  const at::NoGradGuard no_grad;
  if (!are_alike_ || !is_alike(other)) return Misfit{kInfinity, spread()};
  const at::Tensor numbers = numbers_of(other);
  if (!is_noisy_) {
    if (have_same_bits(first_, other)) return std::nullopt;
    return Misfit{distance(numbers_of(first_), numbers), 0.0};
  }
  std::vector<at::Tensor> judged_by{least_, most_, numbers};
  const at::Tensor kinds = kinds_of(numbers);
  if (kinds.defined() || met_.defined()) {
    judged_by.push_back(kinds_or_finite(kinds, numbers));
    judged_by.push_back(kinds_or_finite(met_, numbers));
  }
  const at::Tensor by_size = spread_by_size();
  Judged all;
  for_each_piece(judged_by,
                 [&](const std::vector<at::Tensor>& piece) { all.add(judge(by_size, piece)); });
  if (all.misfit.off >= 0) return all.misfit;
  const Allowance may = allowance();
  if (all.strayed.count > may.stray) return Misfit{all.strayed.off, 0.0};
  if (all.moved.count > may.move) return Misfit{all.moved.off, 0.0};
  return std::nullopt;
}

RunRange::Allowance RunRange::allowance() const {
  const auto late = moved_.begin() + static_cast<int64_t>((moved_.size() + 1) / 2);
  const int64_t most = late == moved_.end() ? 0 : *std::max_element(late, moved_.end());
  const auto part = static_cast<int64_t>(kFew * static_cast<double>(least_.numel()));
  const int64_t few = std::clamp<int64_t>(part, 1, kFewest);
  if (most == 0) return {few, 0};
  return {few + std::accumulate(moved_.begin(), moved_.end(), most), few};
}

// The largest spread of entries up to each power of two.
at::Tensor RunRange::spread_by_size() const {
  at::Tensor by_size =
      at::zeros({kMostExponent - kLeastExponent + 1}, least_.options().dtype(at::kDouble));
  for_each_piece({least_, most_}, [&](const std::vector<at::Tensor>& piece) {
    const auto [spread, size] = spread_and_size(piece[0], piece[1]);
    by_size.scatter_reduce_(0, exponent_of(size).flatten(), spread.flatten(), "amax");
  });
  return std::get<0>(by_size.cummax(0));
}

}  // namespace megagraph
