# SPDX-License-Identifier: Apache-2.0
"""Packs that each say by how many ranks they are shared: graphs of every size have the bits of eager."""

from typing import Any

import pytest
import schedule_jobs
import sharing_jobs
import torch
from worlds import World

pytestmark = pytest.mark.megatron

# Over the largest entry of each gradient: sums over rows in another order; in bfloat16 on a GPU.
BOUND = 5e-2 if torch.cuda.is_available() else 2e-5
SIZES = (1, 2, 4)
# By step and rank. Documents that need four ranks, two, and one; and all three in one micro-batch.
LENGTHS = [
    [[120, 7], [60], [58, 3], [1]],
    [[], [250, 30, 31], [], [5, 6, 7, 8, 9]],
    [[120], [60], [], [60]],
    [[9, 9], [100, 4], [33], [128]],
]
# Of two ranks: a document for both in the first step, one for each in the second.
ON_TWO = [[[120, 7], [60]], [[60], [60]]]


def steps(count: int) -> list[list[list[int]]]:
    """Documents of as many steps."""
    return [LENGTHS[index % len(LENGTHS)] for index in range(count)]


def check(runs: list[dict[str, Any]]) -> None:
    """Every rank replays what it has warmed up, and is as far from one process as sums in another order."""
    for run in runs:
        report = run["report"]
        assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}
        assert run["off"] <= BOUND
        met = {str(size) for sizes in run["sizes"][1:] for size in sizes}
        for size, counts in report["cp_sizes"].items():
            assert size not in met or counts["replayed"] > 0
        # Once: what another rank has met first is not captured again where it is met later.
        found = report["verification"]
        kinds = 2 if run["evaluated"] else 1
        assert found["verified"] + found["unverified"] == kinds * run["num_sizes"]
        replayed = sum(counts.get("replayed", 0) for counts in report["cp_sizes"].values())
        assert replayed == sum(run["numbers"][1:]) + run["evaluated"]


@pytest.mark.parametrize("forced", [None, *SIZES])
def test_every_size_forced_and_as_scheduled(world4: World, forced: int | None) -> None:
    lengths = steps(8) if forced is None else [[[30, 7], [20], [25, 3], [16]]] * 6
    runs = world4.run(
        schedule_jobs.train_scheduled, lengths=lengths, cp_sizes=SIZES, forced=forced, evaluates=True
    )
    check(runs)
    sizes = {size for run in runs for of_step in run["sizes"] for size in of_step}
    assert sizes == ({*SIZES} if forced is None else {forced})
    # In one step some ranks share a pack while others have one each.
    assert forced is not None or any(
        {run["sizes"][step][place] for run in runs} >= {1, 2}
        for step in range(len(lengths))
        for place in range(runs[0]["numbers"][step])
    )


@pytest.mark.parametrize("latent", ["low rank, YaRN", "plain, RoPE"])
def test_multi_latent_attention(world4: World, latent: str) -> None:
    runs = world4.run(
        schedule_jobs.train_scheduled, lengths=steps(6), cp_sizes=SIZES, latent=latent, evaluates=True
    )
    check(runs)


@pytest.mark.parametrize("cp_sizes", [(1, 2, 4), (1, 4)])
def test_a_model_that_has_a_size_of_its_own(world4: World, cp_sizes: tuple[int, ...]) -> None:
    lengths = steps(6)
    check(world4.run(schedule_jobs.train_scheduled, lengths=lengths, cp_sizes=cp_sizes, static=2))


def test_heads_exchanged(world4: World) -> None:
    """As the config says who says how ranks share packs."""
    runs = world4.run(
        schedule_jobs.train_scheduled,
        lengths=steps(6),
        cp_sizes=SIZES,
        cp_comm_type="a2a",
        num_attention_heads=4,
    )
    check(runs)


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_beside_tensor_parallelism(world4: World, is_sequence_parallel: bool) -> None:
    runs = world4.run(
        schedule_jobs.train_scheduled,
        lengths=ON_TWO * 3,
        cp_sizes=(1, 2),
        evaluates=True,
        tensor_parallel=2,
        tensor_model_parallel_size=2,
        sequence_parallel=is_sequence_parallel,
    )
    check(runs)
    assert {size for run in runs for of_step in run["sizes"] for size in of_step} == {1, 2}


def test_capacities_are_learned_for_every_size(world2: World) -> None:
    plugin = {"cuda_graph_max_packed_seqs": (), "max_seqlen_per_dp_cp_rank": None}
    lengths = [[[120, 7], [60]], [[61], [60]]] * 3  # rows that two ranks could not share
    one, other = world2.run(schedule_jobs.train_scheduled, lengths=lengths, cp_sizes=(1, 2), plugin=plugin)
    assert all(capacity["tokens"] % 2 == 0 for capacity in one["report"]["capacities"])
    assert one["report"]["capacities"] == other["report"]["capacities"]
    assert {capacity["cp_size"] for capacity in one["report"]["capacities"]} == {1, 2}
    for run in (one, other):
        assert run["report"]["failures"] == [] and run["report"]["replays"] > 0


def test_packs_that_fit_no_capacity_run_eager_on_their_ranks_alone(world4: World) -> None:
    plugin = {"cuda_graph_max_packed_seqs": (2,)}
    lengths = [[[120, 7], [60], [58], [1]], [[20, 20, 20], [60], [60], [60]]] * 4
    runs = world4.run(schedule_jobs.train_scheduled, lengths=lengths, cp_sizes=SIZES, plugin=plugin)
    misfits = [run["report"]["eager"].get("TOO_MANY_SEQUENCES", 0) for run in runs]
    assert len(set(misfits)) > 1
    for run in runs:
        assert run["report"]["failures"] == [] and run["report"]["replays"] > 0
        assert set(run["report"]["eager"]) <= {"WARMING_UP", "TOO_MANY_SEQUENCES"}


def test_a_group_that_graphs_were_not_captured_with(world2: World) -> None:
    for run in world2.run(sharing_jobs.another_group):
        assert run["eager"] == {"CP_SIZE_NOT_CAPTURED": 1} and run["is_same"]


def test_calls_outside_of_schedules_run_eager(world2: World) -> None:
    """Ranks need not make as many."""
    for run in world2.run(sharing_jobs.call_alone):
        assert run == {"eager": {"GROUP_DISAGREED": 2}, "is_same": True}


def test_a_pack_without_a_slot_is_an_error(world2: World) -> None:
    """Another rank that shares it may have one."""
    for said in world2.run(sharing_jobs.error_of_slot):
        assert "no slot is free for a pack that 2 ranks share" in said


def test_a_model_looks_as_before_after_an_error(world2: World) -> None:
    for run in world2.run(sharing_jobs.raise_inside):
        assert run["inside"] == (2, 2, 2) and run["after"] == (1, 1, None)
        assert run["is_same"]


def test_graphs_go_before_their_groups(world2: World) -> None:
    for run in world2.run(sharing_jobs.destroy):
        assert run == {"before": 2 * 2 * 2, "after": 0}  # sizes, layers, both ways


@pytest.mark.parametrize(
    "change, message",
    [
        ({"local_cp_size": 4, "cp_group": None}, "expected a cp_group of local_cp_size 4, got none"),
        ({"local_cp_size": 2, "cp_group": None}, "expected a cp_group of local_cp_size 2, got none"),
    ],
)
def test_a_pack_without_its_group_is_an_error(world2: World, change: dict[str, Any], message: str) -> None:
    for said in world2.run(sharing_jobs.error_of_pack, change=change):
        assert message in said


@pytest.mark.parametrize(
    "config, name",
    [
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
            "recompute_granularity='selective'",
        ),
        ({"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_topk": 2}, "got experts"),
    ],
)
def test_what_cannot_see_its_ranks_is_an_error(world2: World, config: dict[str, Any], name: str) -> None:
    for said in world2.run(sharing_jobs.error_of_model, config=config):
        assert said.startswith("cp_sizes: expected a model that can run packs of several") and name in said
