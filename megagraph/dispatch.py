# SPDX-License-Identifier: Apache-2.0
"""Decides how one micro-batch runs: which captured variant, or eager and why.

Pure: reads descriptors made of plain numbers, touches no tensor, no device and no Megatron. Ranks
that see the same pack decide alike, because nothing else enters.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Capacity", "Decision", "EagerReason", "PackShape", "decide", "smallest_fit"]


class EagerReason(enum.IntEnum):
    """Why a call ran eager. Closed: the C++ core lists the same names in the same order."""

    DISABLED = 0
    WARMING_UP = 1
    NO_PACK_METADATA = 2
    TOO_MANY_SEQUENCES = 3
    TOO_MANY_TOKENS = 4
    SEQUENCE_TOO_LONG = 5
    CP_SIZE_NOT_CAPTURED = 6
    SIGNATURE_CHANGED = 7
    NO_FREE_SLOT = 8
    SCOPE_UNSUPPORTED = 9
    RECOMPUTING = 10
    CAPTURE_FAILED = 11
    ADDRESS_MOVED = 12
    OVER_BUDGET = 13
    GROUP_DISAGREED = 14
    NESTING = 15
    NUMERICS_CHANGED = 16
    PARAMETERS_CHANGED = 17
    FOREIGN_HOOK = 18
    SHARED_PARAMETER = 19
    RNG_NOT_GRAPH_SAFE = 20
    SUSPENDED = 21
    RELEASED = 22


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


@dataclass(frozen=True, kw_only=True)
class PackShape:
    """What a pack needs, read without touching the device.

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

    def fits(self, capacity: Capacity) -> bool:
        """Whether `capacity` holds this pack."""
        return (
            self.tokens <= capacity.tokens
            and self.num_seqs <= capacity.num_seqs
            and self.max_seqlen <= capacity.max_seqlen
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The capacity to use, or the reason to run eager as the pack was given."""

    capacity: Capacity | None
    reason: EagerReason | None

    def __post_init__(self) -> None:
        assert (self.capacity is None) != (self.reason is None)


def smallest_fit(shape: PackShape, capacities: Iterable[Capacity]) -> Capacity | None:
    """The cheapest capacity that holds the pack, or None.

    Cheapest is fewest tokens, then fewest documents, then the shortest longest document.
    """
    return min((capacity for capacity in capacities if shape.fits(capacity)), default=None)


def _too_small(shape: PackShape, capacities: Sequence[Capacity]) -> EagerReason:
    """The first dimension in which the pack exceeds every capacity that held the ones before it."""
    fitting = [capacity for capacity in capacities if shape.tokens <= capacity.tokens]
    if not fitting:
        return EagerReason.TOO_MANY_TOKENS
    fitting = [capacity for capacity in fitting if shape.num_seqs <= capacity.num_seqs]
    if not fitting:
        return EagerReason.TOO_MANY_SEQUENCES
    return EagerReason.SEQUENCE_TOO_LONG


def decide(shape: PackShape | None, capacities_by_cp_size: dict[int, tuple[Capacity, ...]]) -> Decision:
    """Picks the capacity for a pack.

    Args:
        shape: the pack; None where the micro-batch carries no packed sequences.
        capacities_by_cp_size: what the bank can hold for each context-parallel size.

    Returns:
        The smallest capacity that holds the pack, else the reason why there is none.
    """
    if shape is None:
        return Decision(capacity=None, reason=EagerReason.NO_PACK_METADATA)
    capacities = capacities_by_cp_size.get(shape.cp_size, ())
    if not capacities:
        return Decision(capacity=None, reason=EagerReason.CP_SIZE_NOT_CAPTURED)
    capacity = smallest_fit(shape, capacities)
    if capacity is None:
        return Decision(capacity=None, reason=_too_small(shape, capacities))
    return Decision(capacity=capacity, reason=None)
