# SPDX-License-Identifier: Apache-2.0
"""Says which documents of a step run together, on which ranks, and in which micro-batch.

The deciding is in csrc/decide/pack_schedule.h, Note [Schedules of packs]. Moves no tokens and knows no
process groups; what a rank counts is its place among the ranks that share one global batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch  # noqa: F401  # loads what the core is linked with

from megagraph import _C
from megagraph.decide.dispatch import Capacity

__all__ = ["PackSchedule", "ScheduleLimits", "ScheduledPack", "schedule_packs"]


@dataclass(frozen=True, kw_only=True)
class ScheduleLimits:
    """What a schedule has to keep to, and by what it weighs documents.

    A document of L tokens on c ranks has ``rows = L / c`` on each, rounded up as `alignment` says, and costs
    it ``rows + L**2 / (c * attention_parity) + exchange * rows * (c - 1)``.

    Args:
        ranks: data-parallel times context-parallel ranks, a multiple of the largest of `cp_sizes`.
        cp_sizes: how many ranks may share a pack: ascending powers of two. A group of c ranks begins at a
            multiple of c.
        max_seqlen_per_dp_cp_rank: rows of one rank in one micro-batch, at most.
        max_packed_seqs: documents of one pack, at most; those that the convention of the tail adds do not
            count.
        alignment: rows of a document on one rank are a multiple of it, and of twice as many where ranks
            share it (zigzag).
        attention_parity: the length, in tokens, at which a document's attention costs as much as everything
            else in a layer; with dense layers of width h about 12 * h.
        exchange: what it costs to fetch a token's keys and values, as a part of everything else for a token.
        micro_batch_multiple: the number of micro-batches is a multiple of it, as interleaved pipelines want.
    """

    ranks: int
    cp_sizes: tuple[int, ...]
    max_seqlen_per_dp_cp_rank: int
    max_packed_seqs: int
    alignment: int = 1
    attention_parity: int = 49152
    exchange: float = 0.05
    micro_batch_multiple: int = 1

    def rows(self, length: int, cp_size: int) -> int:
        """Rows of a document of `length` tokens on each of `cp_size` ranks that share it."""
        step = self.alignment if cp_size == 1 else 2 * self.alignment
        return -(-length // (cp_size * step)) * step

    def capacity(self, cp_size: int, *, extra_seqs: int = 0) -> Capacity:
        """What holds every pack of a size that a schedule can have.

        Args:
            cp_size: ranks that share the pack.
            extra_seqs: documents that the convention of the tail adds.
        """
        tokens = self.max_seqlen_per_dp_cp_rank
        return Capacity(
            tokens=tokens, num_seqs=self.max_packed_seqs + extra_seqs, max_seqlen=tokens * cp_size
        )


class ScheduledPack(NamedTuple):
    """One pack, and who runs it.

    Args:
        cp_size: how many ranks share it.
        first_rank: the first of them, a multiple of `cp_size`; the others follow it.
        documents: by index, ascending.
    """

    cp_size: int
    first_rank: int
    documents: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PackSchedule:
    """What all ranks run in one step.

    Args:
        micro_batches: the packs of each, by their first rank. Every rank is in exactly one of each
            micro-batch's packs, and no pack is empty. A rank's sizes never grow from one to the next.
        costs: of each rank, all its packs together, in tokens.
    """

    micro_batches: tuple[tuple[ScheduledPack, ...], ...]
    costs: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """The costliest rank's cost over the mean; 1 is even."""
        return max(self.costs) * len(self.costs) / sum(self.costs)

    def of_rank(self, rank: int) -> list[ScheduledPack]:
        """The packs of one rank, one for each micro-batch."""
        return [
            next(pack for pack in packs if pack.first_rank <= rank < pack.first_rank + pack.cp_size)
            for packs in self.micro_batches
        ]


def schedule_packs(lengths: Sequence[int], limits: ScheduleLimits) -> PackSchedule:
    """Deals documents out to ranks and micro-batches; every one runs exactly once.

    Takes the fewest micro-batches it finds, and makes the largest sum of costs of a rank small. Ranks that
    call it with equal arguments get equal schedules.

    Args:
        lengths: of all documents of the step, on all ranks in the same order; each at least 1.
        limits: of the schedule.

    Raises:
        ValueError: if a limit is out of range, a document is too long for the largest group, there are fewer
            documents than packs that have to be filled, or no schedule was found.
    """
    micro_batches, costs = _C.schedule_packs(
        lengths,
        ranks=limits.ranks,
        cp_sizes=limits.cp_sizes,
        max_tokens=limits.max_seqlen_per_dp_cp_rank,
        max_seqs=limits.max_packed_seqs,
        alignment=limits.alignment,
        attention_parity=limits.attention_parity,
        exchange=limits.exchange,
        multiple=limits.micro_batch_multiple,
    )
    return PackSchedule(
        micro_batches=tuple(tuple(map(ScheduledPack._make, packs)) for packs in micro_batches),
        costs=tuple(costs),
    )
