# SPDX-License-Identifier: Apache-2.0
"""Packs that say by how many ranks they are shared, beside each scope, each kind of pass and of tail."""

from typing import Any

import context_models
import crossing_jobs
import pytest
import schedule_jobs
from megatron_rig import CAPACITY
from test_dynamic_context import ON_TWO, check
from worlds import World

pytestmark = pytest.mark.megatron

WITHOUT_UPDATES = {**context_models.MANY_KINDS, "moe_router_bias_update_rate": 0.0}
TWO: dict[str, Any] = {"lengths": ON_TWO * 2, "cp_sizes": (1, 2)}


def test_a_tail_that_is_a_document(world2: World) -> None:
    plugin = {"tail": "empty-dummy", "cuda_graph_max_packed_seqs": (CAPACITY.num_seqs + 1,)}
    check(world2.run(schedule_jobs.train_scheduled, plugin=plugin, **TWO))


@pytest.mark.parametrize("model", [{}, {"latent": "plain, RoPE"}, {"adapters": True}], ids=str)
def test_passes_for_log_probabilities(world2: World, model: dict[str, Any]) -> None:
    """Without gradients, in training mode, between steps of another size."""
    lengths = [[[60], [60]], *[[[120, 7], [60]]] * 3]
    options = {"model": model, "evaluates": True, "in_training": True}
    runs = world2.run(schedule_jobs.train_scheduled, **{**TWO, **options, "lengths": lengths})
    check(runs)
    for run in runs:
        first, *others = run["sizes"]
        assert set(first) == {1} and all(2 in sizes for sizes in others)


@pytest.mark.parametrize("model", [{}, {"latent": "low rank, YaRN"}, {"latent": "plain, RoPE"}], ids=str)
def test_tables_that_megatron_drops(world2: World, model: dict[str, Any]) -> None:
    """Its caches are few, and another model asks for tables that are longer, between two replays."""
    for eager in world2.run(crossing_jobs.ask_for_longer_tables, model=model):
        assert set(eager) == {"WARMING_UP"}


def test_the_largest_groups_come_first(world4: World) -> None:
    """On every rank alike: communicators of several sizes could wait for each other."""
    for used, captured in world4.run(crossing_jobs.order_of_sizes):
        assert used == [4, 2]
        # Prepared, warmed up and captured; verified after that, in sizes that every rank has met.
        assert captured[:9] == [4, 2, 1] * 3


def test_modules_that_change_between_steps_are_followed(world2: World) -> None:
    for sees_ranks, said in world2.run(crossing_jobs.change_between_steps):
        assert sees_ranks and "recompute_granularity='selective'" in said


@pytest.mark.parametrize(
    "model, config",
    [({}, {}), ({"latent": "plain, RoPE", "experts": True}, WITHOUT_UPDATES)],
    ids=["dense", "latent experts"],
)
@pytest.mark.parametrize("is_inside", [False, True], ids=["behind the layers", "in a layer"])
def test_an_error_leaves_every_module_as_it_was(
    world2: World, model: dict[str, Any], config: dict[str, Any], is_inside: bool
) -> None:
    options = {"model": model, "config": config, "is_inside": is_inside}
    for run in world2.run(crossing_jobs.raise_inside, **options):
        assert run["differed"] > 0 and run["is_as_before"] and run["is_same"]
