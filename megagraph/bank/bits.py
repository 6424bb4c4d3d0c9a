# SPDX-License-Identifier: Apache-2.0
"""Compares tensors: whether they have the same bits, whether one is a run like others, how far it is off.

Note [A run like others]
Kernels that add with atomics make other bits in each run. So a graph is right if it is one run more of the
module, and every entry is judged by what the module's own runs have made of it. Sizes differ by orders of
magnitude inside of one tensor (the rows of a busy expert and of an idle one), and one spread for all of it
would let a graph lose the small ones. Therefore

- an entry that differs between runs may lie outside of what they made of it, by four times its own spread, or
  by twice that of entries that are no larger, if that is no more than twice the spread of its row (of 64
  entries that lie together, where rows are shorter);
- an entry that is the same in all runs has to be the same in the graph. Yet each run moves a few for the
  first time. The graph may move twice as many as any of the later runs did, and a few of a large tensor, each
  by a rounding of its own or twice the spread of entries that are no larger, and by little beside the largest
  one of its row;
- an entry that is infinite or no number in the graph is so in some run, and one that is so in all runs is so
  in the graph. It excuses nothing else; nor do runs of several shapes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "MOST_FURTHER",
    "Difference",
    "Misfit",
    "Range",
    "Results",
    "differ_as_rounded",
    "distance",
    "has_bits",
    "have_same_bits",
]


MOST_FURTHER = (
    3  # verifications: of dozens of tensors some differ by chance in two verifications, hardly any in four
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor of a site that its graph and its module make differently.

    Args:
        slot: whose graph.
        index: the site.
        tensor: what differs, in words.
        off: by how much the graph misses the module, at most.
        spread: how far runs of the module are apart, at most, where it does.
        is_noisy: runs of the module differ in this tensor.
        is_rounding: it is as small and as rare as what kernels that add with atomics make of one call.
    """

    slot: int
    index: int
    tensor: str
    off: float
    spread: float
    is_noisy: bool = False
    is_rounding: bool = False

    def may_be_chance(self, times: int) -> bool:
        """Whether it may not recur in further verifications, having recurred in `times` of them."""
        return times < (MOST_FURTHER if self.is_rounding else 1 if self.is_noisy else 0)

    @property
    def place(self) -> tuple[int, int, str]:
        """What differs: of which slot and site, which tensor."""
        return self.slot, self.index, self.tensor

    def __str__(self) -> str:
        own = f", and eager there from itself by up to {self.spread:.3g}" if self.is_noisy else ""
        return f"{self.tensor} differs from eager by up to {self.off:.3g}{own}"


Results = dict[str, Tensor]  # of one run, by what they are in words

# Of as many runs that all differ, any one is in the pair that lies furthest apart with a chance of 1 in 3.
_SPREADS = 2
_OWN_SPREADS = 4  # of an entry, by itself: for as many as there are, chance makes of few runs a small spread
# What an order of additions changes, where few of them are in another order: entries, and of the largest one.
_FEW, _ROUNDING = 1e-2, 2.0**-6
_FEWEST = 8  # entries that count as few in a large tensor
_LONG_ROW = 64  # entries that tell how far others beside them may go
_CHUNK = 2**19  # entries that are compared at once, since doubles of all of them would take much memory
_LEAST_EXPONENT, _MOST_EXPONENT = -1075, 1025  # of doubles; the first is that of zero here


def _bits(tensor: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
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
    """Some rows at a time of tensors of one shape, each piece as [rows, entries of a row].

    Entries that lie together count as one row where rows are short, and a part of a row where they are long.
    """
    count, width = tensors[0].numel(), tensors[0].shape[-1] if tensors[0].dim() else 1
    if not count:
        return
    width = min(-(-_LONG_ROW // width) * width if width < _LONG_ROW else width, _CHUNK)
    flat, end = [tensor.reshape(-1) for tensor in tensors], count - count % width
    rows = [tensor[:end].view(-1, width).split(max(1, _CHUNK // width)) for tensor in flat]
    yield from zip(*rows, strict=True) if end else ()
    if end < count:
        yield tuple(tensor[end:].view(1, -1) for tensor in flat)


def _numbers(tensor: Tensor) -> Tensor:
    """The same as a type that has minima."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.is_floating_point():
        return tensor.float() if tensor.element_size() == 1 else tensor
    return tensor.long()


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """What a run has made that is not like others.

    Args:
        off: by how much it misses, at most, the other run that it is furthest from.
        spread: how far the others are apart, at most, where it misses them.
    """

    off: float
    spread: float


# What an entry is in a run: each is a bit, so that several runs have several.
_FINITE, _NAN, _INFINITE, _BELOW = 1, 2, 4, 8


def _kinds(numbers: Tensor) -> Tensor | None:
    """Of each entry what it is; None where all are finite."""
    if not numbers.is_floating_point() or bool(numbers.isfinite().all()):
        return None
    kinds = torch.full(numbers.shape, _FINITE, dtype=torch.uint8, device=numbers.device)
    kinds.masked_fill_(numbers.isnan(), _NAN).masked_fill_(numbers.isposinf(), _INFINITE)
    return kinds.masked_fill_(numbers.isneginf(), _BELOW)


class Range:
    """What several runs have made of one tensor, in the memory of two: Note [A run like others].

    Args:
        first: of the first run.

    Attributes:
        is_noisy: runs have different bits.
    """

    def __init__(self, first: Tensor) -> None:
        self._kind = first.shape, first.dtype
        self.is_noisy = False
        self._are_alike = True  # all runs, in shape and type
        self._first = first.clone()
        numbers = _numbers(self._first)
        self._met = _kinds(numbers)
        self._least = self._most = _finite(numbers).contiguous()
        self._moved = [0]  # by each run: entries that were the same until then
        self._spread: float | None = 0.0

    def add(self, run: Tensor) -> None:
        """Takes one run more."""
        self._are_alike = self._are_alike and self._kind == (run.shape, run.dtype)
        if not self._are_alike:
            self.is_noisy = True
            return
        if not self.is_noisy:
            if have_same_bits(run, self._first):
                self._moved.append(0)
                return
            self.is_noisy, self._most = True, self._least.clone()
            del self._first
        numbers = _numbers(run)
        self._meet(_kinds(numbers))
        finite, moved = _finite(numbers), 0
        for least, most, one in _pieces(self._least, self._most, finite):
            moved += int(((least == most) & (one != least) & ~_isnan(one)).sum())
        self._moved.append(moved)
        torch.fmin(self._least, finite, out=self._least)
        torch.fmax(self._most, finite, out=self._most)
        self._spread = None

    def _meet(self, kinds: Tensor | None) -> None:
        if kinds is None and self._met is None:
            return
        finite = torch.full_like(self._met if kinds is None else kinds, _FINITE)  # type: ignore[arg-type]
        self._met = (finite if self._met is None else self._met) | (finite if kinds is None else kinds)

    @property
    def spread(self) -> float:
        """How far apart any two runs are; infinite where that cannot be told."""
        if not self._are_alike or (self._met is not None and bool((self._met & (self._met - 1)).any())):
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
        if not self.is_noisy:
            is_same = have_same_bits(self._first, other)
            off = distance(_numbers(self._first), _numbers(other))
            return None if is_same else Misfit(off=off, spread=0.0)
        numbers = _numbers(other)
        kinds = _kinds(numbers)
        met = self._met
        if kinds is not None or met is not None:
            finite = torch.full(numbers.shape, _FINITE, dtype=torch.uint8, device=numbers.device)
            kinds, met = (finite if it is None else it for it in (kinds, met))
        strange = () if kinds is None or met is None else (kinds, met)
        by_size, moved = self._spread_by_size(), 0
        off = spread = off_moved = -1.0
        for piece in _pieces(self._least, self._most, numbers, *strange):
            judged = _judge(by_size, *piece)
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


def _judge(
    by_size: Tensor,
    least: Tensor,
    most: Tensor,
    other: Tensor,
    kinds: Tensor | None = None,
    met: Tensor | None = None,
) -> "_Judged":
    """Judges some rows of a run.

    Args:
        by_size: the largest spread of entries up to each power of two.
        least: of other runs, where they are finite; NaN where none is.
        most: the same.
        other: the run.
        kinds: what its entries are.
        met: all that they are in other runs.
    """
    eps, width = torch.finfo(least.dtype).eps if least.is_floating_point() else 0.0, least.shape[1]
    spread, size = _spread_and_size(least, most)
    is_inside, is_steady = (least <= other) & (other <= most), least == most
    if kinds is not None and met is not None:
        is_inside |= (kinds > _FINITE) & ((kinds & met) > 0)
    off = torch.maximum(_apart(other, least), _apart(other, most))
    may_be_off = _SPREADS * by_size[_exponent(size)]
    of_row = float("inf") if width < _LONG_ROW else _SPREADS * spread.amax(1, keepdim=True)
    little = _ROUNDING * size.amax(1, keepdim=True)
    bound = torch.where(
        is_steady,
        torch.maximum(may_be_off, eps * size).minimum(little),
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


def _isnan(numbers: Tensor) -> Tensor:
    return numbers != numbers


def _finite(numbers: Tensor) -> Tensor:
    """A copy with NaN for what is infinite, which minima pass over."""
    is_float = numbers.is_floating_point()
    return numbers.masked_fill(numbers.isinf(), float("nan")) if is_float else numbers.clone()


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """How far entries are apart, in doubles; infinite where that is no number."""
    if one.is_floating_point():
        return (one.double() - other.double()).abs().nan_to_num_(float("inf"), float("inf"))
    return (one - other).abs().double()  # whole numbers may have more digits than doubles


def _spread_and_size(least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """How far runs are apart and how large, of each entry, in doubles; zero where none is finite."""
    size = torch.maximum(least.double().abs(), most.double().abs()).nan_to_num_(0.0)
    return _apart(most, least).masked_fill_(_isnan(least), 0.0), size


def _exponent(size: Tensor) -> Tensor:
    """The place of each size among powers of two; the first one is that of zero."""
    exponent = torch.frexp(size).exponent.long().masked_fill_(size == 0, _LEAST_EXPONENT)
    return exponent - _LEAST_EXPONENT
