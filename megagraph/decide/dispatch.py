# SPDX-License-Identifier: Apache-2.0
"""Decides how one micro-batch runs: which captured variant, or eager and why.

Pure: reads descriptors made of plain numbers, touches no tensor, no device and no Megatron. Ranks
that see the same pack decide alike, because nothing else enters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megagraph.decide.reasons import EagerReason

__all__ = ["Capacity", "PackShape", "decide"]


@dataclass(frozen=True, kw_only=True, order=True)
class Capacity:
    """What one captured variant can hold.

    Args:
        tokens: physical tokens of one rank's share of the pack.
        num_seqs: documents, zero-length ones included.
        max_seqlen: tokens of the longest document, padding included.
    """

    tokens: int
    num_seqs: int
    max_seqlen: int

    def __post_init__(self) -> None:
        for name in ("tokens", "num_seqs", "max_seqlen"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"a capacity's {name} must be an integer of at least 1, got {value!r}")

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.num_seqs} documents of up to {self.max_seqlen}"


class PackShape(NamedTuple):
    """What a pack needs, read without touching the device. Made in each micro-batch, hence a plain tuple.

    Args:
        tokens: physical tokens of this rank's share.
        num_seqs: entries of `cu_seqlens` less one.
        max_seqlen: the longest document the pack declares.
        cp_size: context-parallel ranks that share the pack.
    """

    tokens: int
    num_seqs: int
    max_seqlen: int
    cp_size: int = 1

    def exceeds(self, capacity: Capacity) -> EagerReason | None:
        """The first of tokens, documents and length that `capacity` does not hold; None if it fits."""
        if self.tokens > capacity.tokens:
            return _TOO_MANY_TOKENS
        if self.num_seqs > capacity.num_seqs:
            return _TOO_MANY_SEQUENCES
        if self.max_seqlen > capacity.max_seqlen:
            return _SEQUENCE_TOO_LONG
        return None


# Looked up once: an attribute of an enumeration costs as much as a call.
_TOO_MANY_TOKENS = EagerReason.TOO_MANY_TOKENS
_TOO_MANY_SEQUENCES = EagerReason.TOO_MANY_SEQUENCES
_SEQUENCE_TOO_LONG = EagerReason.SEQUENCE_TOO_LONG


def decide(
    shape: PackShape | None, capacities_by_cp_size: Mapping[int, Sequence[Capacity]]
) -> Capacity | EagerReason:
    """Picks the capacity for a pack.

    Cheapest is fewest tokens, then fewest documents, then the shortest longest document. If none
    holds the pack, the reason is the first dimension in which it exceeds every capacity that held the
    ones before it.

    Args:
        shape: the pack; None if the micro-batch carries no packed sequences.
        capacities_by_cp_size: what the bank can hold for each context-parallel size.

    Returns:
        The cheapest capacity that holds the pack, else the reason to run eager as the pack was given.
    """
    if shape is None:
        return EagerReason.NO_PACK_METADATA
    found: Capacity | None = None
    why: EagerReason | None = None
    for capacity in capacities_by_cp_size.get(shape.cp_size, ()):
        exceeded = shape.exceeds(capacity)
        if exceeded is None:
            if found is None or capacity < found:
                found = capacity
        elif why is None or exceeded is _SEQUENCE_TOO_LONG or why is _TOO_MANY_TOKENS:
            why = exceeded
    if found is not None:
        return found
    return EagerReason.CP_SIZE_NOT_CAPTURED if why is None else why
