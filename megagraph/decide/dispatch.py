# SPDX-License-Identifier: Apache-2.0
"""What a captured variant can hold, what a pack needs, what a pipeline has in flight; csrc/decide decides.

Capacities are configured, or learned from the packs of a warm-up.
"""

import statistics
from collections.abc import Collection
from typing import NamedTuple

import torch  # noqa: F401  # whose libraries the core needs

from megagraph._C import Capacity, PackForm, PackShape, StageSchedule, VariantKey

__all__ = [
    "Capacity",
    "Needs",
    "PackForm",
    "PackShape",
    "StageSchedule",
    "VariantKey",
    "capacities_for",
    "needs_of",
]


class Needs(NamedTuple):
    """What packs need. Where ranks have seen different ones, the largest of each number serves all."""

    tokens: int = 0  # of the largest one
    usual_seqs: int = 0  # documents, rounded up to a power of two, that most have room in
    most_seqs: int = 0  # that all have room in, likewise


def needs_of(observed: Collection[PackShape], extra_seqs: int = 0) -> Needs:
    """What some packs need, less the documents that the tail's convention adds to each; zeros for none."""
    if not observed:
        return Needs()
    counts = [max(shape.num_seqs - extra_seqs, 1) for shape in observed]
    usual, most = (1 << (count - 1).bit_length() for count in (statistics.median_high(counts), max(counts)))
    return Needs(tokens=max(shape.tokens for shape in observed), usual_seqs=usual, most_seqs=most)


def capacities_for(needs: Needs, extra_seqs: int = 0, cp_size: int = 1) -> tuple[Capacity, ...]:
    """Capacities that would have held every observed pack: one for most packs, one for the rest.

    The longest document is taken to be as long as a pack, which `cp_size` ranks share: a later one may be.
    """
    return tuple(
        Capacity(tokens=needs.tokens, num_seqs=count + extra_seqs, max_seqlen=needs.tokens * cp_size)
        for count in sorted({needs.usual_seqs, needs.most_seqs})
    )
