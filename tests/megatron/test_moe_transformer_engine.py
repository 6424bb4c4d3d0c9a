# SPDX-License-Identifier: Apache-2.0
"""Experts in layers of Transformer Engine, on a GPU: attention and routers in graphs, experts eager."""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import moe_rig
import pytest
from megatron_rig import graph_config, te_layer_spec
from moe_rig import steps_of
from same_bits import assert_same_bits
from streams import seed_streams

from megagraph.config import GraphConfig
from megagraph.megatron.specs import with_grouped_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.megatron,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
    ),
    pytest.mark.filterwarnings("ignore"),  # its own, of every kind
]
BOTH = ("attn", "moe_router")
Config = dict[str, Any]
SHARED = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True}
# Its kernels want multiples of 16.
SIZES: Config = {"moe_ffn_hidden_size": 64, "normalization": "RMSNorm"}
CASES: dict[str, Config] = {
    "grouped": {"moe_grouped_gemm": True},
    "one by one": {},
    "grouped, shared, bias": {
        "moe_grouped_gemm": True,
        **moe_rig.CASES["sigmoid, bias, groups"],
        **SHARED,
    },
    "grouped, drop and pad": {"moe_grouped_gemm": True, **moe_rig.CASES["drop and pad"]},
    "fused permutation": {"moe_grouped_gemm": True, "moe_permute_fusion": True},
}


@pytest.fixture(autouse=True)
def deterministic_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read when an attention module is made."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    moe_rig.forget_metrics()
    yield


def block_spec(kinds: str, *, is_grouped: bool) -> Any:
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = {
        "E": te_layer_spec(num_experts=moe_rig.EXPERTS, moe_grouped_gemm=is_grouped),
        "-": te_layer_spec(),
    }
    return TransformerBlockSubmodules(layer_specs=[layers[kind] for kind in kinds], layer_norm=TENorm)


def run(
    config: GraphConfig, kinds: str, count: int, *, never_waits: bool = False, **changes: Any
) -> moe_rig.ExpertRun:
    seed_streams()  # of which its modules draw their weights
    spec = block_spec(kinds, is_grouped=changes.get("moe_grouped_gemm", False))
    spec = with_grouped_experts(spec) if never_waits else spec
    return moe_rig.run(config, kinds, steps_of(count), spec=spec, **{**SIZES, **changes})


def compare(kinds: str, count: int, scopes: Sequence[str] = BOTH, **changes: Any) -> Config:
    """Trains in mode `eager` and with graphs, with the same bits. Returns the report of the graphs."""
    eager = run(graph_config(mode="eager", cuda_graph_modules=scopes), kinds, count, **changes)
    graphed = run(graph_config(cuda_graph_modules=scopes), kinds, count, **changes)
    assert_same_bits(eager, graphed)
    return graphed.report


@pytest.mark.parametrize("case", CASES)
def test_bits(case: str) -> None:
    report = compare("EE", 8, **CASES[case])
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * 2}
    assert report["verification"]["unverified"] == 0 and report["graphs"] == 2 * 2


@pytest.mark.parametrize("scopes", [("attn",), ("moe_router",), ("attn", "mlp", "moe_router")], ids=str)
def test_other_scopes_among_dense_layers(scopes: Sequence[str]) -> None:
    report = compare("E-", 8, scopes, **CASES["grouped, shared, bias"])
    assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}
    assert report["replays"] >= 0.95 * (report["calls"] - report["eager"]["WARMING_UP"])


@pytest.mark.parametrize("is_grouped", [True, False], ids=["grouped", "one by one"])
def test_layers_whose_experts_never_wait_are_graphed_whole(is_grouped: bool) -> None:
    """Of either of Megatron's specs of experts, in layers of Transformer Engine."""
    report = compare("E-", 8, (), never_waits=True, moe_grouped_gemm=is_grouped, **SHARED)
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * 2}
    assert report["layers"] == 2 and report["verification"]["unverified"] == 0


def test_a_hundred_steps() -> None:
    report = compare("E-E", 100, ("attn", "mlp", "moe_router"), **CASES["grouped, shared, bias"])
    assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}
    assert report["replays"] >= 0.95 * report["calls"]
