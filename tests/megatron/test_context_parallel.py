# SPDX-License-Identifier: Apache-2.0
"""Models whose context-parallel ranks share every pack: graphs have the bits of eager, and eager is right."""

from typing import Any

import context_jobs
import pytest
import torch
from worlds import World, Worlds

pytestmark = pytest.mark.megatron

# Over the largest entry: sums over rows in another order, in float32 on the CPU, in bfloat16 on a GPU.
BOUND = 5e-2 if torch.cuda.is_available() else 2e-5
WARMING_UP = {"WARMING_UP"}


@pytest.mark.parametrize("comm_type", [None, "a2a"])
def test_graphs_have_eager_bits(world2: World, comm_type: str | None) -> None:
    reports = world2.run(context_jobs.train_shared, cp_size=2, cp_comm_type=comm_type)
    for report in reports:
        assert set(report["eager"]) == WARMING_UP and report["failures"] == []
        assert 0 < report["padding_share"] < 1


def test_packs_that_fit_no_capacity_run_eager_on_all_ranks(world2: World) -> None:
    reports = world2.run(context_jobs.train_shared, cp_size=2, misfits=True, has_tails=False)
    assert reports[0]["eager"] == reports[1]["eager"]
    for report in reports:
        assert set(report["eager"]) == WARMING_UP | {"TOO_MANY_SEQUENCES"} and report["failures"] == []


def test_a_tail_that_is_a_document(world2: World) -> None:
    plugin = {"tail": "empty-dummy", "cuda_graph_max_packed_seqs": (6,)}
    for report in world2.run(context_jobs.train_shared, cp_size=2, num_steps=4, plugin=plugin):
        assert set(report["eager"]) == WARMING_UP and report["failures"] == []
    for losses, gradients, _ in world2.run(context_jobs.beside_one_process, cp_size=2, plugin=plugin):
        assert losses <= BOUND and gradients <= BOUND


def test_capacities_are_learned(world2: World) -> None:
    plugin = {"cuda_graph_max_packed_seqs": (), "max_seqlen_per_dp_cp_rank": None}
    reports = world2.run(context_jobs.train_shared, cp_size=2, num_steps=4, has_tails=False, plugin=plugin)
    assert reports[0]["capacities"] == reports[1]["capacities"]
    for report in reports:
        (capacity, *_) = report["capacities"]
        assert capacity["max_seqlen"] == 2 * capacity["tokens"] and report["replays"] > 0


def test_beside_tensor_parallelism(world4: World) -> None:
    sizes: dict[str, Any] = {"cp_size": 2, "tp_size": 2, "sequence_parallel": True}
    for report in world4.run(context_jobs.train_shared, num_steps=4, **sizes):
        assert set(report["eager"]) == WARMING_UP and report["failures"] == []


HEADS = {"num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gathered": HEADS,
    "heads exchanged": {**HEADS, "cp_comm_type": "a2a"},
    "grouped queries": {**HEADS, "num_query_groups": 2},
    # YaRN's tables are Megatron's, which asks a GPU for its part of them.
    "mla": {"model": {"mla": "low rank, RoPE"}},
    "mla, heads exchanged": {"model": {"mla": "plain, RoPE"}, "cp_comm_type": "a2a"},
}


@pytest.mark.parametrize(
    ("ranks", "case", "is_static"),
    [
        *((2, case, is_static) for case in MODELS for is_static in (True, False)),
        *((4, "gathered", True), (4, "heads exchanged", False), (4, "mla", False)),
    ],
)
def test_each_rank_has_its_share_of_whole_packs(
    worlds: Worlds, ranks: int, case: str, is_static: bool
) -> None:
    """Of documents, too, that end right at, before or behind each border between two ranks' rows."""
    world = worlds.of(ranks)
    options = {"cp_size": ranks, "is_static": is_static, **MODELS[case]}
    for losses, gradients, _ in world.run(context_jobs.beside_one_process, **options):
        assert losses <= BOUND and gradients <= BOUND
