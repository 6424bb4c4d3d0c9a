# SPDX-License-Identifier: Apache-2.0
"""Compares tensors: whether they have the same bits, and how far they are apart."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Results", "distance", "have_same_bits", "is_within", "largest", "spread"]

Results = dict[str, Tensor]  # of one run, by what they are in words

# Of as many runs that all differ, any one is in the pair that lies furthest apart with a chance of 1 in 3.
_SPREADS = 2


def _bits(tensor: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    is_exact = not (tensor.is_floating_point() and tensor.element_size() in sizes)
    return tensor if is_exact else tensor.contiguous().view(sizes[tensor.element_size()])


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits; two of the same NaN do."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def distance(one: Tensor, other: Tensor) -> float:
    """The largest one over all entries; infinite where shapes differ or one alone is no number."""
    if one.shape != other.shape:
        return float("inf")
    difference = (one.double() - other.double()).abs()
    is_same = one == other
    found = float(difference.masked_fill(is_same, 0.0).max()) if difference.numel() else 0.0
    both_nan = bool((one.isnan() == other.isnan()).all()) if one.is_floating_point() else True
    return found if found == found else (0.0 if both_nan else float("inf"))


def spread(runs: Sequence[Results], name: str) -> float:
    """How far apart runs are in one tensor."""
    found = [run[name] for run in runs if name in run]
    return max(distance(one, other) for one, other in itertools.combinations(found, 2))


def largest(one: Results, runs: Sequence[Results], name: str) -> float:
    """How far one run is from the one of others that is furthest."""
    return max(distance(one[name], run[name]) for run in runs if name in run)


def is_within(one: Results, runs: Sequence[Results], name: str) -> bool:
    """Whether one run is as near to others, in one tensor, as one more of these may be."""
    apart = spread(runs, name)
    return apart > 0 and largest(one, runs, name) <= _SPREADS * apart
