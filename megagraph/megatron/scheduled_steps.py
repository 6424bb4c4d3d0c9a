# SPDX-License-Identifier: Apache-2.0
"""Turns the documents of each step into micro-batches of packs that groups of several sizes share."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megagraph.megatron.parallel.context import ContextGroups
from megagraph.megatron.seams import PACKED_SEQ_PARAMS
from megagraph.packs.schedule import (
    Contents,
    Document,
    ScheduledPack,
    ScheduleLimits,
    contents_of,
    deal,
    gather_contents,
    schedule_packs,
    share,
)

__all__ = ["MicroBatch", "ScheduledSteps"]


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
            alike: if documents cannot be scheduled, or differ in their tensors, ranks have other `limits`, or
            some have no further step.
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
        self._documents = iter(documents)
        self._limits = limits
        self._groups = groups
        self._device = device

    def __iter__(self) -> "ScheduledSteps":
        return self

    def __next__(self) -> list[MicroBatch]:
        documents = next(self._documents, None)
        own = Contents(is_over=True) if documents is None else contents_of(documents)
        every = gather_contents(own._replace(limits=self._limits.as_dict()), self._groups.parent)
        over = [rank for rank, contents in enumerate(every) if contents.is_over]
        if len(over) == len(every):
            raise StopIteration
        if over:
            raise ValueError(f"expected a step of every rank, got none of ranks {over}")
        lengths = [length for contents in every for length in contents.lengths]
        schedule = schedule_packs(lengths, self._limits)
        dealt = deal(documents or (), every, schedule, self._limits, self._groups.parent, self._device)
        packs = schedule.of_rank(self._groups.rank)
        return [
            self._micro_batch(pack, tensors, [lengths[index] for index in pack.documents])
            for pack, tensors in zip(packs, dealt, strict=True)
        ]

    def _micro_batch(
        self, pack: ScheduledPack, tensors: Mapping[str, Tensor], lengths: list[int]
    ) -> MicroBatch:
        size, place = pack.cp_size, self._groups.rank - pack.first_rank
        rows = [self._limits.rows(length, size) for length in lengths]
        positions = [share(torch.arange(num * size), num, size, place) for num in rows]
        # By the limits and not by the pack: packs with and without padded offsets are captured apart.
        is_padded = self._limits.cp_sizes[-1] > 1 or self._limits.alignment > 1
        make = PACKED_SEQ_PARAMS.function()
        has_between = "pad_between_seqs" in inspect.signature(make).parameters
        actual, padded = self._offsets(lengths), self._offsets([num * size for num in rows])
        params = make(
            qkv_format="thd",
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), actual),
            **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), padded if is_padded else None),
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(rows) * size),
            local_cp_size=size,
            cp_group=self._groups.of_size(size),
            **({"pad_between_seqs": True} if is_padded and has_between else {}),
        )
        return MicroBatch(
            cp_size=size,
            tensors={name: tensor[None] for name, tensor in tensors.items()},
            position_ids=torch.cat(positions)[None].to(self._device),
            packed_seq_params=params,
        )

    def _offsets(self, lengths: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self._device)
