# SPDX-License-Identifier: Apache-2.0
"""Says which documents of a step run together, on which ranks and in which micro-batch; hands them out.

The deciding is in csrc/decide/pack_schedule.h, Note [Schedules of packs]; what a rank counts is its place
among the ranks that share one global batch. Which rows of a document a rank has is the zigzag layout of
`megagraph.packs.ops.thd_partition_indices`. Knows no Megatron.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from megagraph import _C
from megagraph._C import PackSchedule, ScheduledPack
from megagraph.decide.dispatch import Capacity

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
    return _C.schedule_packs(lengths, **vars(limits))


# -- the exchange ---------------------------------------------------------------------------------

Document = Mapping[str, Tensor]
"""What belongs to each token of a document, by name: tensors [L] of any dtypes, on one device."""


class Contents(NamedTuple):
    """What one rank brings to a step.

    Args:
        lengths: of its documents, in tokens.
        dtypes: of their tensors, by name; empty where it has no document.
        error: what is wrong with them; None if nothing is.
        is_over: it has no further step.
    """

    lengths: tuple[int, ...] = ()
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    error: str | None = None
    is_over: bool = False


def contents_of(documents: Sequence[Document]) -> Contents:
    """Describes documents; says what is wrong with them instead of raising, for all ranks to hear."""
    lengths: list[int] = []
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    for index, document in enumerate(documents):
        own = tuple(sorted((name, tensor.dtype) for name, tensor in document.items()))
        if not own or (dtypes and own != dtypes):
            return Contents(error=f"document {index}: expected tensors {dict(dtypes) or ''}, got {dict(own)}")
        shapes = {tuple(tensor.shape) for tensor in document.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            return Contents(
                error=f"document {index}: expected tensors of one shape [L], got {sorted(shapes)}"
            )
        dtypes = own
        lengths.append(next(iter(shapes))[0])
    return Contents(tuple(lengths), dtypes)


def gather_contents(own: Contents, group: distributed.ProcessGroup) -> list[Contents]:
    """What every rank of a group brings, by rank. Collective.

    Raises:
        ValueError: on every rank alike, if something is wrong on one, or tensors differ between two.
    """
    every: list[Contents] = [own] * group.size()
    distributed.all_gather_object(every, own, group=group)
    for rank, contents in enumerate(every):
        if contents.error is not None:
            raise ValueError(f"rank {rank}: {contents.error}")
    found = {contents.dtypes: rank for rank, contents in enumerate(every) if contents.lengths}
    if len(found) > 1:
        described = "; ".join(f"rank {rank}: {dict(dtypes)}" for dtypes, rank in found.items())
        raise ValueError(f"expected documents with the same tensors on every rank, got {described}")
    return every


def share(tensor: Tensor, rows: int, size: int, place: int) -> Tensor:
    """The rows of one document that one rank of a group holds; zeros past the document's end.

    Args:
        tensor: [L, ...].
        rows: of each rank; even if `size` is not 1.
        size: ranks of the group.
        place: of the rank in the group.

    Returns:
        [rows, ...].
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
    """Exchanges documents once. Collective; every byte goes to those ranks only that need it.

    Args:
        documents: of this rank.
        every: what each rank brings, as `gather_contents` returns it. The schedule counts documents through:
            rank 0's first.
        schedule: of all documents.
        limits: that it was made with.
        group: whose ranks the schedule counts.
        device: where the exchange happens.

    Returns:
        This rank's share of its pack in each micro-batch, by name: [rows of the pack's documents, in turn].
    """
    lengths = [length for contents in every for length in contents.lengths]
    owners = [rank for rank, contents in enumerate(every) for _ in contents.lengths]
    first = sum(len(contents.lengths) for contents in every[: group.rank()])
    dtypes = next(contents.dtypes for contents in every if contents.lengths)
    widths = [dtype.itemsize for _, dtype in dtypes]
    nothing = torch.empty(0, sum(widths), dtype=torch.uint8, device=device)  # rows are bytes of all tensors

    outgoing: list[list[Tensor]] = [[] for _ in every]
    for pack in (pack for packs in schedule.micro_batches for pack in packs):
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
    of_owner = [
        iter(rows.split(sizes)) for rows, sizes in zip(taken.split(taken_rows), incoming, strict=True)
    ]
    dealt = []
    for pack in packs:
        whole = torch.cat([next(of_owner[owners[document]]) for document in pack.documents])
        columns = zip(dtypes, whole.split(widths, dim=1), strict=True)
        # Copied: a dtype is not viewed where its bytes are not aligned.
        dealt.append(
            {
                name: column.clone(memory_format=torch.contiguous_format).view(dtype).flatten()
                for (name, dtype), column in columns
            }
        )
    return dealt
