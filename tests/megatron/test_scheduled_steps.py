# SPDX-License-Identifier: Apache-2.0
"""Documents of several ranks come to those that their schedule names, cut as attention expects them."""

from collections.abc import Iterable
from itertools import starmap
from types import SimpleNamespace
from typing import Any

import pytest
import schedule_jobs
import torch
from megatron.core import parallel_state
from schedule_jobs import device
from torch import Tensor, distributed
from worlds import World, on_ranks

from megagraph.decide.dispatch import PackShape
from megagraph.megatron.parallel.context import ContextGroups
from megagraph.megatron.scheduled_steps import MicroBatch, ScheduledSteps
from megagraph.packs.ops import thd_partition_indices
from megagraph.packs.schedule import ScheduleLimits, schedule_packs

pytestmark = pytest.mark.megatron

OPTIONS = {"cp_sizes": (1, 2, 4), "max_seqlen_per_dp_cp_rank": 64, "max_packed_seqs": 4}
# By step and rank: one that mixes sizes, one where some bring nothing, one document for all.
LENGTHS = [[[120, 7], [60], [58, 3], [1]], [[], [250, 30, 31], [], [5, 6, 7, 8, 9]], [[], [], [11], []]]


CONFIG = SimpleNamespace(calculate_per_token_loss=True)


def document(number: int, length: int) -> dict[str, Tensor]:
    """One that tells by each token which it is."""
    tokens = torch.arange(length) + 1000 * (number + 1)
    return {"tokens": tokens, "loss_mask": torch.ones(length), "even": tokens % 2 == 0}


def on_device(documents: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: rows.to(device()) for name, rows in each.items()} for each in documents]


def groups_of(cp_sizes: tuple[int, ...]) -> ContextGroups:
    groups = ContextGroups(parallel_state.get_data_parallel_group(with_context_parallel=True), cp_sizes)
    groups.warm_up(device())
    return groups


def check_share(pack: Any, batch: MicroBatch, lengths: list[int], limits: ScheduleLimits, rank: int) -> None:
    """Of a rank, of a pack of documents that have these lengths."""
    size, first, documents = pack.cp_size, pack.first_rank, pack.documents
    params = batch.packed_seq_params
    assert batch.cp_size == params.local_cp_size == size
    ranks = [rank] if params.cp_group is None else distributed.get_process_group_ranks(params.cp_group)
    assert ranks == list(range(first, first + size))
    whole = [document(i, lengths[i]) for i in documents]
    padded = [limits.rows(lengths[i], size) * size for i in documents]
    bounds = torch.tensor([0, *padded]).cumsum(0).int()
    indices = thd_partition_indices(bounds, int(bounds[-1]), size, rank - first).long()
    for name, share in batch.tensors.items():
        rows = [
            torch.nn.functional.pad(each[name], (0, num - each[name].numel()))
            for each, num in zip(whole, padded, strict=True)
        ]
        assert torch.equal(share.cpu(), torch.cat(rows)[indices][None]), name
    positions = torch.cat([torch.arange(num) for num in padded])
    assert torch.equal(batch.position_ids.cpu(), positions[indices][None])
    assert params.cu_seqlens_q.diff().tolist() == [lengths[i] for i in documents]
    assert params.max_seqlen_q == params.max_seqlen_kv == max(padded)
    bounds_in_pack = params.cu_seqlens_q_padded
    if limits.cp_sizes == (1,) and limits.alignment == 1:
        assert bounds_in_pack is None
    else:
        assert bounds_in_pack.tolist() == bounds.tolist()
    shape = PackShape(indices.numel(), len(documents), params.max_seqlen_kv, size)
    assert shape.exceeds(limits.capacity(size)) is None


@pytest.mark.parametrize("alignment", [1, 4])
@on_ranks(4)
def test_every_rank_gets_its_share_of_every_pack(alignment: int) -> None:
    limits = ScheduleLimits(ranks=4, alignment=alignment, **OPTIONS)
    groups, sizes = groups_of(limits.cp_sizes), set()
    own = []
    for of_ranks in LENGTHS:
        first = sum(map(len, of_ranks[: groups.rank]))
        own.append(on_device(starmap(document, enumerate(of_ranks[groups.rank], first))))
    steps = ScheduledSteps(own, limits=limits, groups=groups, config=CONFIG, device=device())
    for step, of_ranks in zip(steps, LENGTHS, strict=True):
        lengths = [length for of_rank in of_ranks for length in of_rank]
        schedule = schedule_packs(lengths, limits)
        assert len(step) == len(schedule.micro_batches)
        for pack, batch in zip(schedule.of_rank(groups.rank), step, strict=True):
            assert batch.packed_seq_params.cp_group is groups.of_size(batch.cp_size)
            check_share(pack, batch, lengths, limits, groups.rank)
        sizes |= {pack.cp_size for rank in range(4) for pack in schedule.of_rank(rank)}
    assert sizes == {1, 2, 4}


@on_ranks(4)
def test_documents_that_cannot_be_dealt_are_an_error_on_every_rank() -> None:
    rank, groups = distributed.get_rank(), groups_of((1, 2))
    limits = ScheduleLimits(ranks=4, cp_sizes=(1, 2), max_seqlen_per_dp_cp_rank=16, max_packed_seqs=4)
    short = {name: rows[:-1] if name == "tokens" else rows for name, rows in document(0, 5).items()}
    narrow = {name: rows.int() if name == "tokens" else rows for name, rows in document(0, 5).items()}
    one = [document(0, 5)]
    for of_ranks, message in (
        ([[one], [one], [one], []], r"^expected a step of every rank, got none of ranks \[3\]$"),
        ([[one], [[short]], [one], [one]], r"^rank 1: document 0: expected tensors of one shape \[L\]"),
        (
            [[one], [[narrow]], [one], [one]],
            "^expected documents with the same tensors on every rank, got rank",
        ),
        ([[one], [[document(0, 33)]], [one], [[]]], "^document 1 of 33 tokens is too long"),
        ([[[]], [[]], [[]], [[]]], "^0 documents cannot fill"),
    ):
        own = map(on_device, of_ranks[rank])
        steps = ScheduledSteps(own, limits=limits, groups=groups, config=CONFIG, device=device())
        with pytest.raises(ValueError, match=message):
            next(steps)
    other = limits.replace(max_packed_seqs=4 + rank // 3)
    steps = ScheduledSteps([on_device(one)], limits=other, groups=groups, config=CONFIG, device=device())
    with pytest.raises(ValueError, match=r"^max_packed_seqs: expected .*, got 4 on rank 0, .*, 5 on rank 3$"):
        next(steps)


@pytest.mark.parametrize(
    "per_token, sizes, message",
    [
        (False, (1, 2), "expected calculate_per_token_loss=True"),
        (True, (1,), r"expected limits of 4 ranks in groups of \(1,\), got 4 in groups of \(1, 2\)"),
    ],
)
def test_what_cannot_be_trained_is_an_error(per_token: bool, sizes: tuple[int, ...], message: str) -> None:
    limits = ScheduleLimits(ranks=4, cp_sizes=(1, 2), max_seqlen_per_dp_cp_rank=16, max_packed_seqs=4)
    groups: Any = SimpleNamespace(num_ranks=4, cp_sizes=sizes)
    with pytest.raises(ValueError, match=message):
        ScheduledSteps(
            [],
            limits=limits,
            groups=groups,
            config=SimpleNamespace(calculate_per_token_loss=per_token),
            device=torch.device("cpu"),
        )


def test_ranks_train_what_one_process_would(world2: World) -> None:
    """On packs of one rank each, graphed as eager, with as many micro-batches everywhere."""
    shapes = [
        [[60, 7, 30], [5]],
        [[20, 20, 20], [50, 9, 9]],
        [[64], [3, 3, 3, 3, 3, 3]],
        [[], [40, 41, 42, 8]],
    ]
    one, other = world2.run(schedule_jobs.train_scheduled, lengths=shapes)
    numbers = one["numbers"]
    assert numbers == other["numbers"] and set(numbers) == {1, 2}
    for run in (one, other):
        found = run["report"]
        assert run["off"] <= 1e-5 if not torch.cuda.is_available() else run["off"] <= 2e-2  # bf16
        assert found["failures"] == [] and set(found["eager"]) == {"WARMING_UP"}
        assert found["eager"]["WARMING_UP"] == numbers[0] * found["layers"]
        assert found["replays"] == sum(numbers[1:]) * found["layers"]
