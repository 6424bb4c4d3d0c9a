# SPDX-License-Identifier: Apache-2.0
"""What a captured variant can hold, and what a pack needs, in plain numbers.

Touches no tensor, no device and no Megatron. Which capacity a pack gets is decided in
csrc/decide/dispatch.h, in each micro-batch.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from megagraph.decide.reasons import EagerReason

__all__ = ["Capacity", "PackShape"]


@dataclass(frozen=True, kw_only=True, order=True)
class Capacity:
    """What one captured variant can hold.

    Args:
        tokens: physical tokens of one rank's share of the pack.
        num_seqs: documents, zero-length ones included.
        max_seqlen: tokens of the longest document, padding included, of all ranks that share it together.

    Raises:
        ValueError: for what is no integer, or less than 1.
    """

    tokens: int
    num_seqs: int
    max_seqlen: int

    def __post_init__(self) -> None:
        for name in ("tokens", "num_seqs", "max_seqlen"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"a capacity's {name} must be an integer of at least 1, got {value!r}")

    def shared_by(self, cp_size: int) -> "Capacity":
        """Of packs that ranks share: a document that may fill one rank's tokens may fill theirs.

        Args:
            cp_size: those ranks.
        """
        is_as_long = self.max_seqlen == self.tokens
        return dataclasses.replace(self, max_seqlen=self.tokens * cp_size) if is_as_long else self

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.num_seqs} documents of up to {self.max_seqlen}"


class PackShape(NamedTuple):
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

    def exceeds(self, capacity: Capacity) -> EagerReason | None:
        """The first of tokens, documents and length that `capacity` does not hold; None if it fits."""
        if self.tokens > capacity.tokens:
            return EagerReason.TOO_MANY_TOKENS
        if self.num_seqs > capacity.num_seqs:
            return EagerReason.TOO_MANY_SEQUENCES
        if self.max_seqlen > capacity.max_seqlen:
            return EagerReason.SEQUENCE_TOO_LONG
        return None
