# SPDX-License-Identifier: Apache-2.0
"""A graph holds collectives only of groups whose ranks run the same pack; they agree on what they learn."""

import logging

import group_jobs
import pytest
from worlds import World

from megagraph.config import GraphConfig
from megagraph.decide.learn import Needs
from megagraph.megatron.graphs.capacities import Capacities
from megagraph.megatron.parallel.groups import ranks_of_pack

pytestmark = pytest.mark.megatron

LAYERS, MICROS = 2, 3
CALLS = group_jobs.NUM_STEPS * MICROS * LAYERS
STEP_CALLS = MICROS * LAYERS
TENSOR_PARALLEL = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({}, []),
        ({"expert_model_parallel_size": 2}, []),
        ({"tensor_model_parallel_size": 2}, ["tp", "tp_cp"]),
        ({"context_parallel_size": 2}, ["cp", "tp_cp"]),
    ],
)
def test_ranks_that_share_a_pack_run_the_same_one(
    world2: World, sizes: dict[str, int], names: list[str]
) -> None:
    for found in world2.run(group_jobs.groups_of_pack, sizes=sizes):
        assert found == (names, [0, 1] if names else [])


def test_of_tensor_and_context_parallelism_together_all_ranks_are_peers() -> None:
    tensor, context, both = frozenset({0, 1}), frozenset({0, 2}), frozenset({0, 1, 2, 3})
    assert ranks_of_pack({"tp": tensor, "cp": context, "tp_cp": both}) == both
    assert ranks_of_pack({"tp": tensor, "tp_cp": tensor}) == tensor
    assert ranks_of_pack({"cp": context}) == context
    # No group has them all: the context-parallel one cannot be in a graph.
    assert ranks_of_pack({"tp": tensor, "cp": context}) == tensor
    # Of a model whose own layers share nothing.
    assert ranks_of_pack({"tp_cp": both}) == frozenset()


def test_a_models_own_groups_come_first_and_megatrons_are_what_else_there_is(world2: World) -> None:
    for alone, after_its_end, without in world2.run(group_jobs.own_groups, tensor_parallel=2):
        assert alone == [] and after_its_end == without == [0, 1]


def test_ranks_agree_only_on_what_all_of_them_say(world2: World) -> None:
    for answers in world2.run(group_jobs.agreements, tensor_parallel=2):
        assert answers == [True, False, True, False, True]


def test_ranks_that_have_left_their_groups_still_ask_each_other(world2: World) -> None:
    world2.run(group_jobs.use_and_leave, tensor_parallel=2)


def test_a_group_that_only_released_graphs_had_is_used_no_more(world2: World) -> None:
    """Else whoever destroys it would drop the graphs of now, and it would stay in memory."""
    world2.run(group_jobs.hold_and_let_go, tensor_parallel=2)


@pytest.mark.parametrize("how", ["attribute", "parameter", "collection"])
def test_a_layer_with_collectives_of_other_packs_leaves_the_graphs(world2: World, how: str) -> None:
    """By name; the other layer replays, on packs that differ from rank to rank."""
    for report in world2.run(group_jobs.hold_other_packs, how=how):
        assert report["eager"] == {"WARMING_UP": STEP_CALLS, "SCOPE_UNSUPPORTED": (CALLS - STEP_CALLS) // 2}
        (failure,) = report["failures"]
        assert failure.startswith(
            "layer 1 (TransformerLayer) stays eager (SCOPE_UNSUPPORTED): collectives of"
        )
        assert "other packs (ep, 2 ranks: mlp." in failure and failure.endswith("are not supported yet")


def test_groups_of_the_job_that_no_layer_has_taken_keep_nothing_eager(world2: World) -> None:
    """Dense layers hold the collection of all groups, those of experts and of data parallelism among them."""
    for report in world2.run(group_jobs.hold_other_packs, how="whole collection"):
        assert report["eager"] == {"WARMING_UP": STEP_CALLS} and report["failures"] == []


def test_a_layer_that_gets_such_a_group_later_leaves_the_graphs_then(world2: World) -> None:
    for report in world2.run(group_jobs.hold_later):
        assert report["eager"] == {
            "WARMING_UP": STEP_CALLS,
            "STATE_CHANGED": STEP_CALLS,
            "SCOPE_UNSUPPORTED": (CALLS - 3 * STEP_CALLS) // 2,
        }
        assert any("other packs (ep, 2 ranks: mlp.ep_group)" in failure for failure in report["failures"])


def test_another_group_of_the_same_ranks_is_in_the_graphs_until_it_goes(world2: World) -> None:
    """Experts may be spread over tensor-parallel ranks: what counts is who they are."""
    for report in world2.run(group_jobs.hold_same_packs, tensor_parallel=2, transformer=TENSOR_PARALLEL):
        assert report["gone"] == (0, 0)  # not with a group that nobody holds
        assert report["failures"] == [] and report["replays"] >= 2 * STEP_CALLS


def test_a_rank_that_waits_long_to_learn_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    capacities = Capacities(GraphConfig())
    with caplog.at_level(logging.WARNING, logger="megagraph"):
        for is_warm in (False, *([True] * 50)):
            assert not capacities.learn((), is_warm, lambda said: [1, *said[1:]])
    (sentence,) = caplog.messages
    assert "20 steps after its warm-up" in sentence and "cuda_graph_max_packed_seqs" in sentence


@pytest.mark.parametrize(("cp_sizes", "tokens"), [((1,), 61), ((1, 2), 62), ((2,), 62)])
def test_learned_tokens_are_even_where_ranks_share_documents(cp_sizes: tuple[int, ...], tokens: int) -> None:
    """Each rank has a share of both halves of a document."""
    capacities = Capacities(GraphConfig(), cp_sizes[0], cp_sizes)
    needs = Needs(tokens=61, usual_seqs=4, most_seqs=8)
    assert capacities.learn((), True, lambda said: [0, *needs])
    found = [capacity.tokens for size in cp_sizes for capacity in capacities.by_cp_size[size]]
    assert found == [tokens] * 2 * len(cp_sizes)


@pytest.mark.parametrize("how", ["unreadable", "longer"])
def test_ranks_learn_the_same_capacities_from_other_packs(world2: World, how: str) -> None:
    """Bug: each rank learned its own, so that they captured different graphs, and used none."""
    job = group_jobs.learn_apart
    runs = world2.run(job, tensor_parallel=2, how=how, transformer=TENSOR_PARALLEL)
    most, warm_up = (16, 2) if how == "unreadable" else (32, 1)
    for mode in ("eager", "graph"):
        here, there = (run[mode] for run in runs)
        assert here["capacities"] == there["capacities"] and here["failures"] == there["failures"] == []
        assert max(capacity["num_seqs"] for capacity in here["capacities"]) == most
    assert here["replays"] == there["replays"] == (group_jobs.NUM_STEPS - warm_up) * 2 * LAYERS
