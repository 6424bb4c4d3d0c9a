# SPDX-License-Identifier: Apache-2.0
"""Attention of Transformer Engine in models whose packs ranks share, on GPUs."""

from typing import Any

import context_jobs
import context_models
import pytest
import schedule_jobs
from megatron_rig import needs_engine
from test_dynamic_context import ON_TWO, check
from worlds import World

pytestmark = [pytest.mark.gpu, pytest.mark.megatron, needs_engine]

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "dense, fused RoPE": ({}, {"apply_rope_fusion": True}),
    "mla": ({"mla": "low rank, YaRN"}, {}),
    "experts": ({"experts": True}, {}),
    "MLA experts": ({"mla": "low rank, YaRN", "experts": True}, context_models.MANY_KINDS),
}
BOUND = 5e-2  # of bfloat16, over the largest entry: sums over rows in another order


def _plugin(model: dict[str, Any]) -> dict[str, Any]:
    return {"cuda_graph_modules": ("attn", "moe_router")} if "experts" in model else {}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tail", ["hidden", "empty-dummy"])
def test_packs_of_one_size(world2: World, name: str, tail: str) -> None:
    """The zero-valid document at the end, and rows that no offset tells of."""
    model, config = MODELS[name]
    plugin = {"tail": tail, "cuda_graph_max_packed_seqs": (6,), **_plugin(model)}
    reports = world2.run(
        context_jobs.train_shared,
        cp_size=2,
        num_steps=10,
        model={"engine": True, **model},
        plugin=plugin,
        **config,
    )
    for report in reports:
        assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}


@pytest.mark.parametrize("comm_type", ["a2a", "all_gather"])
def test_other_ways_of_sharing(world2: World, comm_type: str) -> None:
    options = {"model": {"engine": True}, "cp_comm_type": comm_type}
    for report in world2.run(context_jobs.train_shared, cp_size=2, **options):
        assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}


@pytest.mark.parametrize("is_static", [True, False])
def test_each_rank_has_its_share_of_whole_packs(world2: World, is_static: bool) -> None:
    options = {"cp_size": 2, "is_static": is_static, "model": {"engine": True}}
    for losses, gradients, _ in world2.run(context_jobs.beside_one_process, **options):
        assert losses <= BOUND and gradients <= BOUND


@pytest.mark.parametrize("name", MODELS)
def test_packs_of_several_sizes(world2: World, name: str) -> None:
    model, config = MODELS[name]
    runs = world2.run(
        schedule_jobs.train_scheduled,
        lengths=ON_TWO * 3,
        cp_sizes=(1, 2),
        model={"engine": True, **model},
        plugin=_plugin(model),
        evaluates=True,
        has_reference="experts" not in model,
        **config,
    )
    check(runs, warm_up_steps=2)  # its modules are in another state after their first call
