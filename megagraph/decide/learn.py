# SPDX-License-Identifier: Apache-2.0
"""Learns a bank of capacities from the packs of a warm-up. Pure."""

import statistics
from collections.abc import Iterable, Sequence

from megagraph.decide.dispatch import Capacity, PackShape

__all__ = ["learn_capacities"]


def _power_of_two(value: float) -> int:
    return 1 << (max(int(value), 1) - 1).bit_length()


def learn_capacities(observed: Iterable[PackShape], extra_seqs: int = 0) -> tuple[Capacity, ...]:
    """Capacities that would have held every observed pack: one for most packs, one for the rest.

    The longest document is taken to be as long as a pack, since a later one may be; the number of
    documents is rounded up to a power of two.

    Args:
        observed: at least one.
        extra_seqs: documents that the convention of the tail adds to each pack, and to each shape.
    """
    shapes: Sequence[PackShape] = list(observed)
    tokens = max(shape.tokens for shape in shapes)
    counts = [shape.num_seqs - extra_seqs for shape in shapes]
    buckets = {_power_of_two(statistics.median_high(counts)), _power_of_two(max(counts))}
    return tuple(
        Capacity(tokens=tokens, num_seqs=bucket + extra_seqs, max_seqlen=tokens) for bucket in sorted(buckets)
    )
