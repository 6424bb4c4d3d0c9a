# SPDX-License-Identifier: Apache-2.0
"""Experts in models whose packs ranks share."""

from typing import Any

import context_jobs
import context_models
import pytest
from test_dynamic_context import BOUND
from worlds import World, Worlds

pytestmark = pytest.mark.megatron

SCOPES = ("attn", "moe_router")

YARN = pytest.param("low rank, YaRN", marks=pytest.mark.gpu)  # Megatron makes its table there


@pytest.mark.parametrize("mla", [None, "plain, RoPE", YARN])
def test_packs_of_one_size(world2: World, mla: str | None) -> None:
    options: dict[str, Any] = context_models.MANY_KINDS | {"expert_model_parallel_size": 2}
    for report in world2.run(
        context_jobs.train_shared,
        cp_size=2,
        model={"experts": True, "mla": mla},
        plugin={"cuda_graph_modules": SCOPES},
        misfits=True,
        has_tails=False,
        **options,
    ):
        assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP", "TOO_MANY_SEQUENCES"}


@pytest.mark.parametrize("cp_sizes", [(), (2,)])
def test_beside_tensor_parallelism(world4: World, cp_sizes: tuple[int, ...]) -> None:
    options: dict[str, Any] = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    options["sequence_parallel"] = True
    for report in world4.run(
        context_jobs.train_shared,
        cp_size=2,
        tp_size=2,
        num_steps=4,
        has_tails=not cp_sizes,
        model={"experts": True},
        plugin={"cuda_graph_modules": SCOPES, "cp_sizes": cp_sizes},
        **options,
    ):
        assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}
        assert report["replays"] > 0


@pytest.mark.parametrize(("ranks", "is_static"), [(2, True), (2, False), (4, False)])
def test_each_rank_has_its_share_of_whole_packs(worlds: Worlds, ranks: int, is_static: bool) -> None:
    """Losses of routers are those of whole packs, and are logged as these.

    Bug: in 0.16 they weighed the less the more ranks shared a pack, where losses are per token. Where all
    packs are shared alike that is Megatron's own, and all weigh alike.
    """
    world = worlds.of(ranks)
    options: dict[str, Any] = {"cp_size": ranks, "is_static": is_static, "model": {"experts": True}}
    options["calculate_per_token_loss"] = not is_static
    for losses, gradients, metrics in world.run(context_jobs.beside_one_process, **options):
        assert losses <= BOUND and gradients <= BOUND and 0 <= metrics <= BOUND
