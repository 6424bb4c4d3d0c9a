# SPDX-License-Identifier: Apache-2.0
"""Hands every rank its share of the documents that a schedule gives it, in one exchange.

Decides nothing and knows no Megatron. Which rows of a document a rank has is the zigzag layout of
`megagraph.packs.ops.thd_partition_indices`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from megagraph.packs.schedule import PackSchedule, ScheduleLimits

__all__ = ["Contents", "Document", "contents_of", "deal", "gather_contents", "share"]

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
        tensor: [L].
        rows: of each rank; even if `size` is not 1.
        size: ranks of the group.
        place: of the rank in the group.

    Returns:
        [rows].
    """
    padded = torch.nn.functional.pad(tensor, (0, rows * size - tensor.numel()))
    if size == 1:
        return padded
    pieces = padded.view(2 * size, rows // 2)
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
    row_bytes = sum(dtype.itemsize for _, dtype in dtypes)

    outgoing: list[dict[str, list[Tensor]]] = [{name: [] for name, _ in dtypes} for _ in every]
    for pack in (pack for packs in schedule.micro_batches for pack in packs):
        for document in (index for index in pack.documents if owners[index] == group.rank()):
            rows = limits.rows(lengths[document], pack.cp_size)
            for name, tensor in documents[document - first].items():
                here = tensor.to(device)
                for place in range(pack.cp_size):
                    part = share(here, rows, pack.cp_size, place)
                    outgoing[pack.first_rank + place][name].append(part)
    parts = [
        torch.cat(of_name).view(torch.uint8)
        for of_rank in outgoing
        for of_name in of_rank.values()
        if of_name
    ]
    sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
    sent_rows = [sum(part.numel() for part in of_rank[dtypes[0][0]]) for of_rank in outgoing]

    packs = schedule.of_rank(group.rank())
    taken_rows = [0] * group.size()
    for pack in packs:
        for document in pack.documents:
            taken_rows[owners[document]] += limits.rows(lengths[document], pack.cp_size)
    taken = torch.empty(sum(taken_rows) * row_bytes, dtype=torch.uint8, device=device)
    distributed.all_to_all_single(
        taken,
        sent,
        output_split_sizes=[rows * row_bytes for rows in taken_rows],
        input_split_sizes=[rows * row_bytes for rows in sent_rows],
        group=group,
    )

    # By rank and name; a rank's documents are in the order of the packs.
    columns: list[dict[str, Tensor]] = []
    for block, rows in zip(taken.split([rows * row_bytes for rows in taken_rows]), taken_rows, strict=True):
        of_names = block.split([rows * dtype.itemsize for _, dtype in dtypes])
        # Copied: a dtype is not viewed where its bytes are not aligned.
        columns.append(
            {name: part.clone().view(dtype) for (name, dtype), part in zip(dtypes, of_names, strict=True)}
        )
    starts = [0] * group.size()
    dealt = []
    for pack in packs:
        shares: dict[str, list[Tensor]] = {name: [] for name, _ in dtypes}
        for document in pack.documents:
            owner, rows = owners[document], limits.rows(lengths[document], pack.cp_size)
            for name, column in columns[owner].items():
                shares[name].append(column[starts[owner] : starts[owner] + rows])
            starts[owner] += rows
        dealt.append({name: torch.cat(of_name) for name, of_name in shares.items()})
    return dealt
