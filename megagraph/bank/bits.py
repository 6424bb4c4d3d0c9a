# SPDX-License-Identifier: Apache-2.0
"""Compares tensors: whether they have the same bits, whether one is a run like others, how far it is off.

Note [A run like others]
Kernels that add with atomics make other bits in each run. So a graph is right if it is one run more of the
module, and every entry is judged by what the module's own runs have made of it. Sizes differ by orders of
magnitude inside of one tensor (the rows of a busy expert and of an idle one), and one spread for all of it
would let a graph lose the small ones. Therefore

- an entry that differs between runs may lie outside of what they made of it, by four times its own spread, or
  by twice that of entries that are no larger, if that is no more than twice the spread of its row;
- an entry that is the same in all runs has to be the same in the graph. Yet each run moves a few for the
  first time. The graph may move twice as many as any of the later runs did, and a few of a large tensor, each
  by a rounding of its own or twice the spread of entries that are no larger, and by little beside the largest
  one of its row;
- an entry that is no number in the graph is none in some run, and one that is none in all runs is none in the
  graph. Where runs are infinitely far apart, or of several shapes, nothing is excused.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Misfit", "Range", "Results", "differ_as_rounded", "distance", "has_bits", "have_same_bits"]

Results = dict[str, Tensor]  # of one run, by what they are in words

# Of as many runs that all differ, any one is in the pair that lies furthest apart with a chance of 1 in 3.
_SPREADS = 2
_OWN_SPREADS = 4  # of an entry, by itself: for as many as there are, chance makes of few runs a small spread
# What an order of additions changes, where few of them are in another order: entries, and of the largest one.
_FEW, _ROUNDING = 1e-2, 2.0**-6
_FEWEST = 8  # entries that count as few in a large tensor
_LONG_ROW = 64  # entries of one row that tell how far others of it may go
_CHUNK = 2**19  # entries that are compared at once, since doubles of all of them would take much memory
_LEAST_EXPONENT, _MOST_EXPONENT = -1075, 1025  # of doubles; the first is that of zero here


def _bits(tensor: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    is_exact = not (tensor.is_floating_point() and tensor.element_size() in sizes)
    return tensor if is_exact else tensor.contiguous().view(sizes[tensor.element_size()])


def has_bits(tensor: Tensor) -> bool:
    """Whether any bit of a tensor is set: it is not all positive zeros."""
    return bool(_bits(tensor).any())


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits; two of the same NaN do."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def distance(one: Tensor, other: Tensor) -> float:
    """The largest one over all entries; infinite where shapes differ or one alone is no number."""
    if one.shape != other.shape:
        return float("inf")
    return max((_distance(*pair) for pair in _pieces(one, other)), default=0.0)


def _distance(one: Tensor, other: Tensor) -> float:
    is_same = (one == other) | (one.isnan() & other.isnan())
    found = float((one.double() - other.double()).abs().masked_fill(is_same, 0.0).max())
    return found if found == found else float("inf")


def differ_as_rounded(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ in few entries, and there by little beside the largest of all entries."""
    if one.shape != other.shape or not one.is_floating_point():
        return False
    most_entries = max(_FEWEST, int(_FEW * one.numel()))
    most = _ROUNDING * float(one.abs().max()) if one.numel() else 0.0
    return int((one != other).sum()) <= most_entries and distance(one, other) <= most


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some whole rows of tensors of one shape at a time, each piece as [rows, entries of a row]."""
    if not tensors[0].numel():
        return
    width = tensors[0].shape[-1] if tensors[0].dim() else 1
    at_once = max(1, _CHUNK // width)
    yield from zip(*(tensor.reshape(-1, width).split(at_once) for tensor in tensors), strict=True)


def _numbers(tensor: Tensor) -> Tensor:
    """The same as a type that has minima."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """What a run has made that is not like others.

    Args:
        off: how far it is from the one of them that is furthest, over entries that may not be so far.
        spread: how far others are apart in these entries.
    """

    off: float
    spread: float


class Range:
    """What several runs have made of one tensor, in the memory of two: Note [A run like others].

    Args:
        first: of the first run.
    """

    def __init__(self, first: Tensor) -> None:
        self._kind = first.shape, first.dtype
        numbers = _numbers(first)
        self._least, self._most = (numbers.clone(memory_format=torch.contiguous_format) for _ in range(2))
        self._is_nan_at_times: Tensor | None = None
        self._are_alike = True  # all runs, in shape and type
        self._moved = [0]  # by each run: entries that were the same until then
        self._spread: float | None = 0.0

    def add(self, run: Tensor) -> None:
        """Takes one run more."""
        self._are_alike = self._are_alike and self._kind == (run.shape, run.dtype)
        if not self._are_alike:
            return
        run, moved = _numbers(run), 0
        for least, most, one in _pieces(self._least, self._most, run):
            moved += int(((least == most) & (one != least)).sum())
        if self._least.is_floating_point():
            self._note_nan(run)
        torch.fmin(self._least, run, out=self._least)
        torch.fmax(self._most, run, out=self._most)
        self._moved.append(moved)
        self._spread = None

    def _note_nan(self, run: Tensor) -> None:
        differs = run.isnan() != self._least.isnan()
        if self._is_nan_at_times is not None:
            self._is_nan_at_times |= differs
        elif differs.any():
            self._is_nan_at_times = differs

    @property
    def spread(self) -> float:
        """How far apart any two runs are; infinite where that cannot be told."""
        if not self._are_alike or self._is_nan_at_times is not None:
            return float("inf")
        if self._spread is None:
            self._spread = distance(self._least, self._most)
        return self._spread

    def as_rounded(self, other: Tensor) -> bool:
        """Whether another run differs from the least of these by nothing but roundings."""
        return differ_as_rounded(_numbers(other), self._least)

    def misfit(self, other: Tensor) -> Misfit | None:
        """Where another run is not as near to these, entry by entry, as one more may be; None for nowhere."""
        if not self._are_alike or self._kind != (other.shape, other.dtype):
            return Misfit(off=float("inf"), spread=self.spread)
        if not self.spread:
            off = distance(self._least, _numbers(other))
            return None if have_same_bits(self._least, _numbers(other)) else Misfit(off=off, spread=0.0)
        known = (self._least, self._most)
        strange = () if self._is_nan_at_times is None else (self._is_nan_at_times,)
        by_size, moved = self._spread_by_size(), 0
        off = spread = off_moved = -1.0
        for piece in _pieces(*known, _numbers(other), *strange):
            judged = self._judge(by_size, *piece)
            off, spread = max(off, judged.misfit.off), max(spread, judged.misfit.spread)
            moved, off_moved = moved + judged.moved, max(off_moved, judged.off_moved)
        if off >= 0:
            return Misfit(off=off, spread=spread)
        if moved > self._may_move():
            return Misfit(off=off_moved, spread=0.0)
        return None

    def _may_move(self) -> int:
        """Entries that one run more may move: each moves fewer than those before, all in all."""
        late = self._moved[(len(self._moved) + 1) // 2 :]
        few = max(1, min(_FEWEST, int(_FEW * self._least.numel())))
        return few + _SPREADS * max(late, default=0)

    def _spread_by_size(self) -> Tensor:
        """The largest spread of entries up to each power of two."""
        count = _MOST_EXPONENT - _LEAST_EXPONENT + 1
        by_size = torch.zeros(count, dtype=torch.float64, device=self._least.device)
        for least, most in _pieces(self._least, self._most):
            spread, size = _spread_and_size(least, most)
            by_size.scatter_reduce_(0, _exponent(size).flatten(), spread.flatten(), "amax")
        return by_size.cummax(0).values

    @staticmethod
    def _judge(
        by_size: Tensor, least: Tensor, most: Tensor, other: Tensor, nan_at_times: Tensor | None = None
    ) -> "_Judged":
        dtype, width = least.dtype, least.shape[1]
        spread, size = _spread_and_size(least, most)
        least, most, other = least.double(), most.double(), other.double()
        is_inside = ((least <= other) & (other <= most)) | (least.isnan() & other.isnan())
        if nan_at_times is not None:
            is_inside |= nan_at_times & other.isnan()
        off = torch.maximum((other - least).abs(), (other - most).abs()).nan_to_num_(float("inf"))
        may_be_off = _SPREADS * by_size[_exponent(size)]
        of_row = float("inf") if width < _LONG_ROW else _SPREADS * spread.amax(1, keepdim=True)
        rounding = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        little = _ROUNDING * size.amax(1, keepdim=True)
        is_steady = least == most
        bound = torch.where(
            is_steady,
            torch.maximum(may_be_off, rounding * size).minimum(little),
            may_be_off.clamp(max=of_row).maximum(_OWN_SPREADS * spread),
        )
        fits, moved = is_inside | (off <= bound), is_steady & ~is_inside
        return _Judged(
            misfit=Misfit(off=_largest_where(~fits, off), spread=_largest_where(~fits, spread)),
            moved=int(moved.sum()),
            off_moved=_largest_where(moved, off),
        )


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """Some entries of a run: those that may not be what they are, and those that no other run has moved."""

    misfit: Misfit
    moved: int
    off_moved: float


def _largest_where(chosen: Tensor, values: Tensor) -> float:
    """The largest of some values, none of which is negative; -1 for none."""
    return float(values.masked_fill(~chosen, -1.0).max())


def _spread_and_size(least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """How far apart runs are and how large, of each entry; zero where that is infinite or no number."""
    least, most = least.double(), most.double()
    spread, size = most - least, torch.maximum(least.abs(), most.abs())
    return spread.nan_to_num_(0.0, 0.0, 0.0), size.nan_to_num_(0.0, 0.0, 0.0)


def _exponent(size: Tensor) -> Tensor:
    """The place of each size among powers of two; the first one is that of zero."""
    exponent = torch.frexp(size).exponent.long().masked_fill_(size == 0, _LEAST_EXPONENT)
    return exponent - _LEAST_EXPONENT
