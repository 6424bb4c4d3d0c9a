# SPDX-License-Identifier: Apache-2.0
"""Turns the documents of each step into micro-batches of packs that groups of several sizes share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from megagraph._C import PackDealing
from megagraph.megatron.parallel.context import ContextGroups
from megagraph.megatron.seams import PACKED_SEQ_PARAMS, packs_have
from megagraph.packs.schedule import Document, ScheduledPack, ScheduleLimits, schedule_packs, share

__all__ = ["MicroBatch", "ScheduledSteps"]


class _Contents(NamedTuple):
    """What one rank brings to a step."""

    limits: Mapping[str, Any]  # that it schedules by, by name
    lengths: tuple[int, ...] = ()  # of its documents, in tokens
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()  # of their tensors, by name; empty without a document
    error: str | None = None  # what is wrong with them, for all ranks to hear
    is_over: bool = False  # it has no further step


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """This rank's share of one pack. Rows past a document's end are zeros.

    Args:
        cp_size: how many ranks share the pack.
        tensors: what documents hold, by name; [1, T].
        position_ids: of each row in its document, whole and not cut; int64 [1, T].
        packed_seq_params: Megatron's, with offsets of the whole pack: actual ones, and padded ones where
            ranks share some packs or rows are aligned. `local_cp_size` and `cp_group` are the pack's.
    """

    cp_size: int
    tensors: Mapping[str, Tensor]
    position_ids: Tensor
    packed_seq_params: Any


class ScheduledSteps:
    """Iterates over steps: schedules the documents of all ranks, exchanges them once, and makes the packs.

    A step is a list of this rank's micro-batches, as many on every rank. Its `len()` and its `iter()` are
    `num_microbatches` and `data_iterator` of Megatron's schedule.

    Each `next()` is collective over the ranks of a global batch. Every rank brings documents of its own, any
    number, also none; what several bring counts several times. Ranks of tensor and pipeline parallelism have
    to bring the same documents, and get the same packs then.

    Args:
        documents: of this rank, step by step. All tensors of a document have its length: what is shifted,
            such as labels, is shifted before.
        limits: of each step's schedule. Its `ranks` are those of `groups`, which have all its `cp_sizes`.
        groups: of the ranks of a global batch (`megagraph.context_groups()`).
        config: the model's TransformerConfig.
        device: where documents are exchanged and packs are.

    Raises:
        ValueError: if losses are not per token, or `limits` and `groups` differ. From `next()`, on every rank
            alike: if documents raise or cannot be scheduled, or differ in their tensors, ranks have other
            `limits`, or some have no further step.
    """

    def __init__(
        self,
        documents: Iterable[Sequence[Document]],
        *,
        limits: ScheduleLimits,
        groups: ContextGroups,
        config: Any,
        device: torch.device,
    ) -> None:
        if not config.calculate_per_token_loss:
            raise ValueError(
                "expected calculate_per_token_loss=True in the model's config: packs hold different numbers "
                "of tokens, and a mean of each would weigh them alike"
            )
        if limits.ranks != groups.num_ranks or not {*limits.cp_sizes} <= {*groups.cp_sizes}:
            raise ValueError(
                f"expected limits of {groups.num_ranks} ranks in groups of {groups.cp_sizes}, "
                f"got {limits.ranks} in groups of {limits.cp_sizes}"
            )
        self._documents, self._limits = iter(documents), limits
        self._groups, self._device = groups, device

    def __iter__(self) -> "ScheduledSteps":
        return self

    def __next__(self) -> list[MicroBatch]:
        try:
            ours = None if (given := next(self._documents, None)) is None else [*given]
            contents = self._contents_of(ours)
            # Copied here, where others hear of what cannot be read. No copy is a view that negates.
            own = [[it[key].to(self._device, copy=True) for key, _ in contents.dtypes] for it in ours or ()]
        except Exception as error:  # the others wait to hear of it
            self._gather(_Contents(self._limits.as_dict(), error=f"{type(error).__name__}: {error}"))
            raise
        every = self._gather(contents)
        over = [rank for rank, contents in enumerate(every) if contents.is_over]
        if len(over) == len(every):
            raise StopIteration
        if over:
            raise ValueError(f"expected a step of every rank, got none of ranks {over}")
        # The documents of every rank are counted through, rank 0's first.
        lengths = [length for contents in every for length in contents.lengths]
        schedule, group = schedule_packs(lengths, self._limits), self._groups.parent
        names, types = zip(*next(contents.dtypes for contents in every if contents.lengths), strict=True)
        dealing = PackDealing(schedule, self._limits, [contents.lengths for contents in every], group.rank())
        sent, taken_rows = dealing.outgoing(own, types, self._device), dealing.taken_rows
        taken = sent.new_empty(sum(taken_rows), sent.size(1))
        # Every byte goes to those ranks only that need it.
        distributed.all_to_all_single(taken, sent, taken_rows, dealing.sent_rows, group=group)
        return [
            self._micro_batch(
                pack, dict(zip(names, tensors, strict=True)), [lengths[index] for index in pack.documents]
            )
            for pack, tensors in zip(schedule.of_rank(group.rank()), dealing.packs(taken, types), strict=True)
        ]

    def _contents_of(self, documents: Sequence[Document] | None) -> _Contents:
        """Describes this rank's documents; says what is wrong with them instead of raising."""
        contents = _Contents(self._limits.as_dict(), is_over=documents is None)
        lengths: list[int] = []
        dtypes: tuple[tuple[str, torch.dtype], ...] = ()
        for index, document in enumerate(documents or ()):
            own = tuple(sorted((name, tensor.dtype) for name, tensor in document.items()))
            tensors, wrong = document.values(), ""
            shapes = sorted({tuple(tensor.shape) for tensor in tensors})
            if not own or (dtypes and own != dtypes):
                wrong = f"expected tensors {dict(dtypes) or ''}, got {dict(own)}"
            elif len(shapes) != 1 or len(shapes[0]) != 1:
                wrong = f"expected tensors of one shape [L], got {shapes}"
            elif odd := {it.dtype if it.is_quantized else it.layout for it in tensors} - {torch.strided}:
                wrong = f"expected dense tensors, got {odd.pop()}"
            if wrong:
                return contents._replace(error=f"document {index}: {wrong}")
            dtypes = own
            lengths += shapes[0]
        return contents._replace(lengths=tuple(lengths), dtypes=dtypes)

    def _gather(self, own: _Contents) -> list[_Contents]:
        """What every rank brings, by rank. Raises on every rank alike."""
        every = [own] * self._groups.num_ranks
        distributed.all_gather_object(every, own, group=self._groups.parent)
        for name in own.limits:
            said = {rank: contents.limits.get(name) for rank, contents in enumerate(every)}
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

    def _micro_batch(
        self, pack: ScheduledPack, tensors: Mapping[str, Tensor], lengths: list[int]
    ) -> MicroBatch:
        size, place = pack.cp_size, self._groups.rank - pack.first_rank
        rows = [self._limits.rows(length, size) for length in lengths]
        positions = [share(torch.arange(num * size, device="cpu"), num, size, place) for num in rows]
        # By the limits and not by the pack: packs with and without padded offsets are captured apart.
        is_padded = self._limits.cp_sizes[-1] > 1 or self._limits.alignment > 1
        actual, padded = self._offsets(lengths), self._offsets([num * size for num in rows])
        params = PACKED_SEQ_PARAMS.function()(
            qkv_format="thd",
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), actual),
            **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), padded if is_padded else None),
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(rows) * size),
            local_cp_size=size,
            cp_group=self._groups.of_size(size),
            **({"pad_between_seqs": True} if is_padded and packs_have("pad_between_seqs") else {}),
        )
        return MicroBatch(
            cp_size=size,
            tensors={name: tensor[None] for name, tensor in tensors.items()},
            position_ids=torch.cat(positions)[None].to(self._device),
            packed_seq_params=params,
        )

    def _offsets(self, lengths: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self._device)
