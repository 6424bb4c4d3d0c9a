# SPDX-License-Identifier: Apache-2.0
"""Hybrid models of Mamba, attention, MLP and expert layers, under each set of scopes."""

from typing import Any

import pytest
import torch
from mamba_rig import Documented, HybridExpertTrainer, expert_spec
from megatron_rig import ON_GPU, Install, Run, compare_runs, step, steps_of

import megagraph

pytestmark = [pytest.mark.both, pytest.mark.usefixtures("experts")]

PATTERN = "ME*E-"
STEPS = 8 if ON_GPU else 3
EAGER: dict[str, tuple[Run, Any]] = {}
OF_SYMBOL = {"M": ("mamba",), "*": ("attn",), "-": ("mlp",), "E": ("moe_router",)}
SCOPES = (
    ("mamba", "attn", "moe_router"),
    ("attn", "moe_router"),
    ("mamba", "attn", "mlp", "moe_router"),
    ("moe_router",),
    ("mamba",),
    ("mlp",),
)
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


def compare(scopes: Any, count: int = STEPS, **changes: Any) -> dict[str, Any]:
    """Trains eager and graphed, with the same bits. Returns the report of the graphs."""
    steps, plugin = steps_of(count, make=Documented), {"cuda_graph_modules": scopes}
    graphed = compare_runs(steps, HybridExpertTrainer, plugin, shared=EAGER, pattern=PATTERN, **changes)
    assert all(left.metrics for left in graphed.steps)
    return graphed.report


@pytest.mark.parametrize("scopes", SCOPES, ids=" ".join)
def test_bits_under_each_set_of_scopes(scopes: tuple[str, ...]) -> None:
    report = compare(scopes)
    graphed = sum(any(name in scopes for name in OF_SYMBOL[symbol]) for symbol in PATTERN)
    assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}
    assert report["layers"] == graphed and report["replays"] == (STEPS - 1) * 3 * graphed


@pytest.mark.parametrize("scopes", [("mamba", "attn", "moe_router", "moe_preprocess"), ("mamba", "moe")])
def test_bits_of_experts_that_are_padded(scopes: tuple[str, ...]) -> None:
    report = compare(scopes, **PADDED)
    assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}


def test_where_nothing_is_named_layers_of_experts_alone_stay_eager() -> None:
    report = compare(())
    assert len(report["failures"]) == PATTERN.count("E")
    assert set(report["eager"]) == {"WARMING_UP", "SCOPE_UNSUPPORTED"}
    assert report["replays"] == (STEPS - 1) * 3 * (len(PATTERN) - PATTERN.count("E"))


def test_grouped_experts_are_graphed_with_the_others() -> None:
    if torch.cuda.is_available():
        pytest.skip("test_grouped_experts.py has what bfloat16 asks for")
    report = compare((), spec=megagraph.with_grouped_experts(expert_spec()))
    assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}
    assert report["replays"] == (STEPS - 1) * 3 * len(PATTERN)


def test_a_foreign_layer_in_the_place_of_experts_is_refused_by_name(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install()
    spec = expert_spec()
    spec.submodules.moe_layer = spec.submodules.mlp_layer
    trainer = HybridExpertTrainer("*E", spec=spec)
    step(trainer, [Documented(lengths=(9, 20))])
    assert "MLPLayer as a layer of experts ('E' in the hybrid layer pattern)" in caplog.text
