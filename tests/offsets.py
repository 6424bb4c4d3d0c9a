# SPDX-License-Identifier: Apache-2.0
"""Offsets of documents, for the tests of every floor."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def offsets(lengths: Sequence[int], device: str = "cpu", entries: int | None = None) -> Tensor:
    """Of documents of these lengths, int32; the last one is repeated up to `entries` of them."""
    ends = [0, *accumulate(lengths)]
    if entries is not None:
        ends += ends[-1:] * (entries - len(ends))
    return torch.tensor(ends, dtype=torch.int32, device=device)
