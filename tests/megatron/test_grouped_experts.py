# SPDX-License-Identifier: Apache-2.0
"""Grouped experts: whole layers of experts in graphs, and what they compute beside Megatron's own."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import moe_rig
import pytest
import torch
from megatron_rig import Micro, graph_config
from test_moe import assert_same_run, steps_of

from megagraph.config import GraphConfig
from megagraph.megatron.specs import with_grouped_experts

pytestmark = pytest.mark.megatron

Install = Callable[..., GraphConfig]
Config = dict[str, Any]


@pytest.fixture(autouse=True)
def experts() -> Iterator[None]:
    moe_rig.forget_metrics()
    with moe_rig.experts_on_cpu():
        yield


def compare(kinds: str, steps: Sequence[Sequence[Micro]], scopes: Any = (), **changes: Any) -> Config:
    """Trains in mode `eager` and with graphs, with the same bits. Returns the report of the graphs."""
    spec = with_grouped_experts(moe_rig.block_spec(kinds))
    eager = moe_rig.run(
        graph_config(mode="eager", cuda_graph_modules=scopes), kinds, steps, spec=spec, **changes
    )
    graphed = moe_rig.run(graph_config(cuda_graph_modules=scopes), kinds, steps, spec=spec, **changes)
    assert_same_run(eager, graphed)
    return graphed.report


SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
CASES: dict[str, Config] = {
    "top 1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "top 2": {},
    "top 4 of 4": {"moe_router_topk": 4},
    "swiglu": SWIGLU,
    "fused swiglu": {**SWIGLU, "bias_activation_fusion": True},
    "on the input": {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
    **{name: moe_rig.CASES[name] for name in ("shared experts", "gated shared experts, allgather")},
    **{name: moe_rig.CASES[name] for name in ("sigmoid, bias, groups", "global loss, per token", "jitter")},
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


@pytest.mark.parametrize("case", CASES)
def test_bits(case: str) -> None:
    report = compare("EE", steps_of(20), **CASES[case])
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * 2}
    assert report["replays"] == report["calls"] - 3 * 2
    assert report["verification"]["verified"] == 1 and report["verification"]["unverified"] == 0
    assert report["layers"] == 2 and report["graphs"] == 2 * 2
