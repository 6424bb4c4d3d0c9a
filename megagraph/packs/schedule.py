# SPDX-License-Identifier: Apache-2.0
"""Says which documents of a step run together, on which ranks and in which micro-batch; hands them out.

The deciding is in csrc/decide/pack_schedule.h, Note [Schedules of packs]; what a rank counts is its place
among the ranks that share one global batch. Which rows of a document a rank has is the zigzag layout of
`megagraph.packs.ops.thd_partition_indices`. Knows no Megatron.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from megagraph._C import PackDealing, PackSchedule, ScheduledPack, ScheduleLimits, schedule_packs, share

__all__ = [
    "Contents",
    "Document",
    "PackSchedule",
    "ScheduleLimits",
    "ScheduledPack",
    "contents_of",
    "deal",
    "gather_contents",
    "schedule_packs",
    "share",
]

Document = Mapping[str, Tensor]
"""What belongs to each token of a document, by name: tensors [L] of any dtypes, on one device."""


class Contents(NamedTuple):
    """What one rank brings to a step."""

    lengths: tuple[int, ...] = ()  # of its documents, in tokens
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()  # of their tensors, by name; empty without a document
    error: str | None = None  # what is wrong with them
    is_over: bool = False  # it has no further step
    limits: Mapping[str, Any] | None = None  # what it schedules by, by name


def contents_of(documents: Sequence[Document]) -> Contents:
    """Describes documents; says what is wrong with them instead of raising, for all ranks to hear."""
    lengths: list[int] = []
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    for index, document in enumerate(documents):
        own = tuple(sorted((name, tensor.dtype) for name, tensor in document.items()))
        shapes = sorted({tuple(tensor.shape) for tensor in document.values()})
        wrong = ""
        if not own or (dtypes and own != dtypes):
            wrong = f"expected tensors {dict(dtypes) or ''}, got {dict(own)}"
        elif len(shapes) != 1 or len(shapes[0]) != 1:
            wrong = f"expected tensors of one shape [L], got {shapes}"
        if wrong:
            return Contents(error=f"document {index}: {wrong}")
        dtypes = own
        lengths += shapes[0]
    return Contents(tuple(lengths), dtypes)


def gather_contents(own: Contents, group: distributed.ProcessGroup) -> list[Contents]:
    """What every rank of a group brings, by rank. Collective.

    Raises:
        ValueError: on every rank alike, if something is wrong on one, or two differ in tensors or limits.
    """
    every: list[Contents] = [own] * group.size()
    distributed.all_gather_object(every, own, group=group)
    for name in own.limits or ():
        said = {rank: (contents.limits or {}).get(name) for rank, contents in enumerate(every)}
        if len(set(said.values())) > 1:
            each = ", ".join(f"{value} on rank {rank}" for rank, value in said.items())
            raise ValueError(f"{name}: expected limits that are the same on every rank, got {each}")
    for rank, contents in enumerate(every):
        if contents.error is not None:
            raise ValueError(f"rank {rank}: {contents.error}")
    found = {contents.dtypes: rank for rank, contents in enumerate(every) if contents.lengths}
    if len(found) > 1:
        described = "; ".join(f"rank {rank}: {dict(dtypes)}" for dtypes, rank in found.items())
        raise ValueError(f"expected documents with the same tensors on every rank, got {described}")
    return every


def deal(
    documents: Sequence[Document],
    every: Sequence[Contents],
    schedule: PackSchedule,
    limits: ScheduleLimits,
    group: distributed.ProcessGroup,
    device: torch.device,
) -> list[dict[str, Tensor]]:
    """Exchanges this rank's documents once. Collective; every byte goes to those ranks only that need it.

    The schedule counts the documents of every rank of the group through, rank 0's first. The exchange happens
    on the device. Returns this rank's share of its pack in each micro-batch, by name: [rows of the pack's
    documents, in turn].
    """
    names, types = zip(*next(contents.dtypes for contents in every if contents.lengths), strict=True)
    dealing = PackDealing(schedule, limits, [contents.lengths for contents in every], group.rank())
    sent = dealing.outgoing([[document[name] for name in names] for document in documents], types, device)
    taken_rows = dealing.taken_rows
    taken = sent.new_empty(sum(taken_rows), sent.size(1))
    distributed.all_to_all_single(
        taken, sent, output_split_sizes=taken_rows, input_split_sizes=dealing.sent_rows, group=group
    )
    return [dict(zip(names, tensors, strict=True)) for tensors in dealing.packs(taken, types)]
