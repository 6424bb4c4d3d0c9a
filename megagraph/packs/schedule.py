# SPDX-License-Identifier: Apache-2.0
"""Says which documents of a step run together, on which ranks and in which micro-batch; hands them out.

The deciding is in csrc/decide/pack_schedule.h, Note [Schedules of packs]; what a rank counts is its place
among the ranks that share one global batch. Which rows of a document a rank has is the zigzag layout of
`megagraph.packs.ops.thd_partition_indices`. Knows no Megatron.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from megagraph._C import PackSchedule, ScheduledPack, ScheduleLimits, schedule_packs

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


def share(tensor: Tensor, rows: int, size: int, place: int) -> Tensor:
    """The rows [rows, ...] of a document [L, ...] that a rank holds; zeros past the document's end.

    The rank is in some `place` of a group of `size`. If that is not 1, each has an even number of rows.
    """
    padded = torch.cat([tensor, tensor.new_zeros(rows * size - tensor.size(0), *tensor.shape[1:])])
    if size == 1:
        return padded
    pieces = padded.unflatten(0, (2 * size, rows // 2))
    return torch.cat([pieces[place], pieces[2 * size - 1 - place]])


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
    lengths = [length for contents in every for length in contents.lengths]
    owners = [rank for rank, contents in enumerate(every) for _ in contents.lengths]
    first = sum(len(contents.lengths) for contents in every[: group.rank()])
    dtypes = next(contents.dtypes for contents in every if contents.lengths)
    widths = [dtype.itemsize for _, dtype in dtypes]
    nothing = torch.empty(0, sum(widths), dtype=torch.uint8, device=device)  # rows are bytes of all tensors

    outgoing: list[list[Tensor]] = [[] for _ in every]
    for pack in itertools.chain.from_iterable(schedule.micro_batches):
        for document in (index for index in pack.documents if owners[index] == group.rank()):
            rows = limits.rows(lengths[document], pack.cp_size)
            tensors = (documents[document - first][name].to(device).unsqueeze(1) for name, _ in dtypes)
            whole = torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors], dim=1)
            for place in range(pack.cp_size):
                outgoing[pack.first_rank + place].append(share(whole, rows, pack.cp_size, place))
    packs = schedule.of_rank(group.rank())
    incoming: list[list[int]] = [[] for _ in every]  # rows of documents, by whose they are
    for pack in packs:
        for document in pack.documents:
            incoming[owners[document]].append(limits.rows(lengths[document], pack.cp_size))
    taken_rows = [*map(sum, incoming)]
    taken = nothing.new_empty(sum(taken_rows), sum(widths))
    distributed.all_to_all_single(
        taken,
        torch.cat([nothing, *itertools.chain.from_iterable(outgoing)]),
        output_split_sizes=taken_rows,
        input_split_sizes=[sum(part.size(0) for part in of_rank) for of_rank in outgoing],
        group=group,
    )

    # By rank; a rank's documents are in the order of the packs.
    parts = zip(taken.split(taken_rows), incoming, strict=True)
    of_owner = [iter(rows.split(sizes)) for rows, sizes in parts]
    dealt: list[dict[str, Tensor]] = [{} for _ in packs]
    for tensors_of_pack, pack in zip(dealt, packs, strict=True):
        rows_of_pack = torch.cat([next(of_owner[owners[document]]) for document in pack.documents])
        for (name, dtype), column in zip(dtypes, rows_of_pack.split(widths, dim=1), strict=True):
            # Copied: a dtype is not viewed where its bytes are not aligned.
            copied = column.clone(memory_format=torch.contiguous_format)
            tensors_of_pack[name] = copied.view(dtype).flatten()
    return dealt
