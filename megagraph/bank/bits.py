# SPDX-License-Identifier: Apache-2.0
"""Compares tensors: whether they have the same bits, and how far they are apart."""

import torch
from torch import Tensor

__all__ = ["Range", "Results", "differ_as_rounded", "distance", "has_bits", "have_same_bits"]

Results = dict[str, Tensor]  # of one run, by what they are in words

# Of as many runs that all differ, any one is in the pair that lies furthest apart with a chance of 1 in 3.
_SPREADS = 2
# What an order of additions changes, where few of them are in another order: entries, and of the largest one.
_FEW, _ROUNDING = 1e-2, 2.0**-6
_CHUNK = 2**20  # entries that are compared at once, since doubles of all of them would take much memory


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
    chunks = zip(one.reshape(-1).split(_CHUNK), other.reshape(-1).split(_CHUNK), strict=True)
    return max((_distance(*pair) for pair in chunks), default=0.0)


def _distance(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    is_same = (one == other) | (one.isnan() & other.isnan())
    found = float((one.double() - other.double()).abs().masked_fill(is_same, 0.0).max())
    return found if found == found else float("inf")


def differ_as_rounded(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ in few entries, and there by little beside the largest of all entries."""
    if one.shape != other.shape or not one.is_floating_point():
        return False
    most_entries = max(8, int(_FEW * one.numel()))
    most = _ROUNDING * float(one.abs().max()) if one.numel() else 0.0
    return int((one != other).sum()) <= most_entries and distance(one, other) <= most


class Range:
    """What several runs have made of one tensor, in the memory of two.

    Args:
        first: of the first run.
    """

    def __init__(self, first: Tensor) -> None:
        self._least, self._most = first.clone(), first.clone()
        self._spread: float | None = 0.0

    def add(self, run: Tensor) -> None:
        """Takes one run more."""
        if run.shape != self._least.shape or not torch.equal(run.isnan(), self._least.isnan()):
            self._spread = float("inf")
        if self._spread == float("inf"):
            return
        torch.minimum(self._least, run, out=self._least)
        torch.maximum(self._most, run, out=self._most)
        self._spread = None

    @property
    def spread(self) -> float:
        """How far apart any two runs are."""
        if self._spread is None:
            self._spread = distance(self._least, self._most)
        return self._spread

    def largest(self, other: Tensor) -> float:
        """How far another run is from the one of these that is furthest."""
        return max(distance(other, self._least), distance(other, self._most))

    def holds(self, other: Tensor) -> bool:
        """Whether another run is as near to these as one more of them may be."""
        return self.spread > 0 and self.largest(other) <= _SPREADS * self.spread

    def as_rounded(self, other: Tensor) -> bool:
        """Whether another run differs from the least of these by nothing but roundings."""
        return differ_as_rounded(other, self._least)
