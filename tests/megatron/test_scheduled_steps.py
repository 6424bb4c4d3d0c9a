# SPDX-License-Identifier: Apache-2.0
"""Documents of several ranks come to those that their schedule names, cut as attention expects them."""

from types import SimpleNamespace
from typing import Any

import pytest
import schedule_jobs
import torch
from worlds import World

from megagraph.decide.dispatch import PackShape
from megagraph.megatron.scheduled_steps import ScheduledSteps
from megagraph.packs.ops import thd_partition_indices
from megagraph.packs.schedule import ScheduleLimits, schedule_packs

pytestmark = pytest.mark.megatron

OPTIONS = {"cp_sizes": (1, 2, 4), "max_seqlen_per_dp_cp_rank": 64, "max_packed_seqs": 4}
# By step and rank: one that mixes sizes, one where some bring nothing, one document for all.
LENGTHS = [[[120, 7], [60], [58, 3], [1]], [[], [250, 30, 31], [], [5, 6, 7, 8, 9]], [[], [], [11], []]]


def check_step(batches: list[list[dict[str, Any]]], lengths: list[int], limits: ScheduleLimits) -> None:
    """The micro-batches of every rank, by rank."""
    schedule = schedule_packs(lengths, limits)
    for rank, of_rank in enumerate(batches):
        assert [batch["pack"] for batch in of_rank] == [tuple(pack) for pack in schedule.of_rank(rank)]
        for batch in of_rank:
            size, first, documents = batch["pack"]
            assert batch["size"] == size and batch["group"] == list(range(first, first + size))
            whole = [schedule_jobs.document(i, lengths[i], torch.device("cpu")) for i in documents]
            padded = [limits.rows(lengths[i], size) * size for i in documents]
            bounds = torch.tensor([0, *padded]).cumsum(0).int()
            indices = thd_partition_indices(bounds, int(bounds[-1]), size, rank - first).long()
            for name, share in batch["tensors"].items():
                rows = [
                    torch.nn.functional.pad(document[name], (0, num - document[name].numel()))
                    for document, num in zip(whole, padded, strict=True)
                ]
                assert torch.equal(share, torch.cat(rows)[indices][None]), (rank, name)
            positions = torch.cat([torch.arange(num) for num in padded])
            assert torch.equal(batch["position_ids"], positions[indices][None])
            assert torch.equal(batch["offsets"].diff(), torch.tensor([lengths[i] for i in documents]))
            assert (batch["padded"] is None) == (limits.cp_sizes == (1,) and limits.alignment == 1)
            if batch["padded"] is not None:
                assert torch.equal(batch["padded"], bounds)
            shape = PackShape(indices.numel(), len(documents), batch["max_seqlen"], size)
            assert shape.exceeds(limits.capacity(size)) is None


@pytest.mark.parametrize("alignment", [1, 4])
def test_every_rank_gets_its_share_of_every_pack(world4: World, alignment: int) -> None:
    options = {**OPTIONS, "alignment": alignment}
    limits = ScheduleLimits(ranks=4, **options)
    of_ranks = world4.run(schedule_jobs.steps_of_rank, lengths=LENGTHS, options=options)
    sizes = set()
    for number, of_step in enumerate(LENGTHS):
        lengths = [length for of_rank in of_step for length in of_rank]
        batches = [[batch for batch in found if batch["step"] == number] for found in of_ranks]
        check_step(batches, lengths, limits)
        sizes |= {batch["size"] for of_rank in batches for batch in of_rank}
    assert sizes == {1, 2, 4}


def test_documents_that_cannot_be_dealt_are_an_error_on_every_rank(world4: World) -> None:
    def errors(lengths: list[list[int] | None], case: str = "") -> set[str]:
        return set(world4.run(schedule_jobs.error_of_rank, lengths=lengths, case=case))

    [error] = errors([[5], [5], [5], None])
    assert error == "expected a step of every rank, got none of ranks [3]"
    [error] = errors([[5], [5], [5], [5]], "shape")
    assert error.startswith("rank 1: document 0: expected tensors of one shape [L]")
    [error] = errors([[5], [5], [5], [5]], "dtype")
    assert error.startswith("expected documents with the same tensors on every rank, got rank")
    [error] = errors([[5], [33], [5], []])
    assert error.startswith("document 1 of 33 tokens is too long")
    [error] = errors([[], [], [], []])
    assert error.startswith("0 documents cannot fill")


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
    lengths = [shapes[index % 4] for index in range(24)]
    one, other = world2.run(schedule_jobs.train_scheduled, lengths=lengths)
    numbers = one["numbers"]
    assert numbers == other["numbers"] and set(numbers) == {1, 2}
    for run in (one, other):
        found = run["report"]
        assert run["off"] <= 1e-5 if not torch.cuda.is_available() else run["off"] <= 2e-2  # bf16
        assert found["failures"] == [] and set(found["eager"]) == {"WARMING_UP"}
        assert found["eager"]["WARMING_UP"] == numbers[0] * found["layers"]
        assert found["replays"] == sum(numbers[1:]) * found["layers"]
