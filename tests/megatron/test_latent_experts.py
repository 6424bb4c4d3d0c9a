# SPDX-License-Identifier: Apache-2.0
"""Layers of multi-latent attention with experts, with each set of scopes that they may have."""

from collections.abc import Callable, Sequence

import moe_rig
import pytest
from context_models import LatentExpertTrainer
from moe_rig import expert_step, steps_of
from same_bits import assert_same_bits

import megagraph
from megagraph.config import GraphConfig

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore::UserWarning")]

Install = Callable[..., GraphConfig]
STEPS = 8
# How many sites a layer with experts and a dense one have together.
SITES = {
    ("attn",): 2,
    ("moe_router",): 1,
    ("attn", "moe_router"): 2,
    ("attn", "mlp", "moe_router"): 2,
    ("mlp",): 1,
}


CELLS = [(scopes, "plain, RoPE") for scopes in SITES]
CELLS += [(("attn", "moe_router"), "low rank, YaRN")]


@pytest.mark.parametrize(("scopes", "kind"), CELLS, ids=str)
def test_bits(install: Install, scopes: Sequence[str], kind: str) -> None:
    install(cuda_graph_modules=scopes)
    options = {
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_load_balancing_type": "seq_aux_loss",
    }
    moe_rig.forget_metrics()
    with moe_rig.experts_on_cpu():
        eager, graphed = (LatentExpertTrainer(kind, **options) for _ in range(2))
        for index, micros in enumerate(steps_of(STEPS)):
            expected = expert_step(eager, micros, eager=True)
            assert_same_bits(expert_step(graphed, micros), expected, f"step {index}")
    report = megagraph.reports()[1]
    sites = SITES[tuple(scopes)]
    assert report["eager"] == {"WARMING_UP": 3 * sites} and report["failures"] == []
    assert report["replays"] == (STEPS - 1) * 3 * sites
