# SPDX-License-Identifier: Apache-2.0
"""Learns a bank of capacities from the packs of a warm-up. Pure."""

import statistics
from collections.abc import Collection
from typing import NamedTuple

from megagraph.decide.dispatch import Capacity, PackShape

__all__ = ["Needs", "capacities_for", "needs_of"]


class Needs(NamedTuple):
    """What packs need. Where ranks have seen different ones, the largest of each number serves all.

    Args:
        tokens: of the largest one.
        usual_seqs: documents, rounded up to a power of two, that most have room in.
        most_seqs: that all have room in, likewise.
    """

    tokens: int = 0
    usual_seqs: int = 0
    most_seqs: int = 0


def _power_of_two(value: float) -> int:
    return 1 << (max(int(value), 1) - 1).bit_length()


def needs_of(observed: Collection[PackShape], extra_seqs: int = 0) -> Needs:
    """What some packs need; zeros where there are none.

    Args:
        observed: the packs.
        extra_seqs: documents that the convention of the tail adds to each pack.
    """
    if not observed:
        return Needs()
    counts = [shape.num_seqs - extra_seqs for shape in observed]
    return Needs(
        tokens=max(shape.tokens for shape in observed),
        usual_seqs=_power_of_two(statistics.median_high(counts)),
        most_seqs=_power_of_two(max(counts)),
    )


def capacities_for(needs: Needs, extra_seqs: int = 0, cp_size: int = 1) -> tuple[Capacity, ...]:
    """Capacities that would have held every observed pack: one for most packs, one for the rest.

    The longest document is taken to be as long as a pack, since a later one may be.

    Args:
        needs: of at least one pack.
        extra_seqs: documents that the convention of the tail adds to each shape.
        cp_size: ranks that share each pack.
    """
    return tuple(
        Capacity(tokens=needs.tokens, num_seqs=count + extra_seqs, max_seqlen=needs.tokens * cp_size)
        for count in sorted({needs.usual_seqs, needs.most_seqs})
    )
