# SPDX-License-Identifier: Apache-2.0
"""Draws document lengths from a distribution."""

from __future__ import annotations

import math

import torch

__all__ = ["lognormal_lengths"]


def lognormal_lengths(
    num: int, *, mean: float, sigma: float, minimum: int, maximum: int, seed: int
) -> torch.Tensor:
    """Draws `num` lengths of a lognormal, rounded and clipped to ``[minimum, maximum]``.

    `mean` is the lognormal's own, before clipping (its mu is ``ln(mean) - sigma**2 / 2``): the mean
    of what comes back is lower where `maximum` cuts a heavy tail. The same arguments give the same
    lengths; the first lengths of a longer draw are not those of a shorter one.

    Args:
        num: how many lengths.
        mean: mean of the lognormal, in tokens.
        sigma: standard deviation of the length's logarithm; 0 makes every length `mean`.
        minimum: the shortest length, in tokens.
        maximum: the longest length, in tokens.
        seed: seeds a generator of its own; the global one is left alone.

    Returns:
        int64 ``[num]``.

    Raises:
        ValueError: on an argument out of range.
    """
    if num < 1:
        raise ValueError(f"expected num of at least 1, got {num}")
    if not (math.isfinite(mean) and mean > 0):
        raise ValueError(f"expected a finite mean above 0, got {mean}")
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"expected a finite sigma of at least 0, got {sigma}")
    if minimum < 1:
        raise ValueError(f"expected minimum of at least 1, got {minimum}")
    if maximum < minimum:
        raise ValueError(f"expected maximum of at least minimum ({minimum}), got {maximum}")
    if seed < 0:
        raise ValueError(f"expected seed of at least 0, got {seed}")

    normal = torch.randn(num, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    mu = math.log(mean) - sigma**2 / 2
    # Clipped before it is an integer: the tail of a large sigma is infinite.
    return (mu + sigma * normal).exp().clamp(minimum, maximum).round().to(torch.int64)
