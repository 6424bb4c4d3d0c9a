# SPDX-License-Identifier: Apache-2.0
"""Recompute and dropout: what runs again or draws random numbers inside a captured layer."""

import shutil
from collections.abc import Iterator
from typing import Any

import megatron_rig as rig
import pytest
import torch
from rope_rig import canonical, run, three_modes
from same_bits import assert_same_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megagraph.decide.dispatch import Capacity

pytestmark = pytest.mark.usefixtures("recompute_on_cpu")

STEPS = [[rig.ONE, rig.TWO], [rig.OTHER, rig.ONE], [rig.TWO, rig.TWO], [rig.ONE, rig.OTHER]]
ON_GPU = torch.cuda.is_available()


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


@pytest.fixture
def recomputed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each time that one of Megatron's checkpoints runs its part of the model again."""
    from megatron.core.tensor_parallel import random

    seen: list[str] = []
    original, original_norm = random.CheckpointFunction.backward, random.CheckpointWithoutOutput._recompute

    def backward(ctx: Any, *args: Any) -> Any:
        seen.append("module")
        return original(ctx, *args)

    def recompute(checkpoint: Any, grad: Any) -> Any:
        seen.append("norm")
        return original_norm(checkpoint, grad)

    monkeypatch.setattr(random.CheckpointFunction, "backward", staticmethod(backward))
    monkeypatch.setattr(random.CheckpointWithoutOutput, "_recompute", recompute)
    return seen


def _check_replays(run: rig.Run) -> None:
    """Every call after the warm-up replayed, or on a GPU has a counted reason.

    There, Megatron's checkpoint reads a stream's state, which no capture allows unless the random
    tracker is safe for graphs.
    """
    report = run.report
    if ON_GPU:
        assert set(report["eager"]) <= {"WARMING_UP", "CAPTURE_FAILED", "RNG_NOT_GRAPH_SAFE"}
    else:
        assert report["replays"] == 3 * 2 * rig.LAYERS and report["failures"] == []
        assert report["eager"] == {"WARMING_UP": 2 * rig.LAYERS}


@pytest.mark.parametrize("modules", [("core_attn",), ("mlp",), ("core_attn", "mlp")], ids="-".join)
@pytest.mark.parametrize("dropout", [0.0, 0.2], ids=["plain", "dropout"])
def test_selective_recompute_inside_a_layer_has_eager_bits(
    modules: tuple[str, ...], dropout: float, recomputed: list[str]
) -> None:
    # Without biases: Megatron's checkpoint of an MLP that returns one recurses without end.
    common = {"hidden_dropout": dropout, "add_bias_linear": False}
    graphed = rig.compare_runs(STEPS, config={**_selective(*modules), **common})
    assert recomputed.count("module") >= len(STEPS) * 2 * rig.LAYERS * len(modules)
    if dropout and "mlp" in modules:  # Megatron's rule R17, though the dropout lies behind the MLP
        assert graphed.report["eager"] == {"SCOPE_UNSUPPORTED": len(STEPS) * 2 * rig.LAYERS}
        return
    _check_replays(graphed)
    assert_same_bits(graphed, rig.train(rig.graph_config(), STEPS, config=common, eager=True))


def test_recomputed_norms_inside_a_layer_have_eager_bits(recomputed: list[str]) -> None:
    from megatron.core.tensor_parallel import random

    if not random.HAVE_TE:
        pytest.skip("megatron-core recomputes norms with Transformer Engine only")
    # Later releases compile a few lines of C++ for it.
    if hasattr(random, "_get_share_storage") and None in (shutil.which("ninja"), shutil.which("c++")):
        pytest.skip("this release compiles C++ to recompute a norm: no ninja or no compiler")
    graphed = rig.compare_runs(STEPS, config=_selective("layernorm"))
    assert recomputed.count("norm") >= len(STEPS) * 2 * rig.LAYERS
    _check_replays(graphed)
    assert_same_bits(graphed, rig.train(rig.graph_config(), STEPS, eager=True))


HALF = Capacity(tokens=64, num_seqs=5, max_seqlen=32)
CANONICAL = [
    [canonical((10, 30, 24), capacity=HALF, seed=i), canonical((16, 16, 32), capacity=HALF, seed=50 + i)]
    for i in range(4)
]


@pytest.mark.parametrize("module", ["core_attn", "mlp"])
def test_selective_recompute_of_canonical_packs_has_the_bits_of_an_unpatched_run(module: str) -> None:
    """No part that a graphed model may recompute rotates anything."""
    transformer = {**_selective(module), "add_bias_linear": False}
    three_modes(CANONICAL, capacities=(HALF,), config=transformer)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_a_host_recomputes_rotate_as_they_did(
    use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the backward, outside of any forward of ours."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    original = TransformerLayer.forward
    calls: list[Any] = []

    def checkpointed(layer: Any, hidden_states: Tensor, **given: Any) -> Any:
        def body(hidden: Tensor) -> Any:
            calls.append(layer)
            return original(layer, hidden_states=hidden, **given)

        return checkpoint(body, hidden_states, use_reentrant=use_reentrant)

    monkeypatch.setattr(TransformerLayer, "forward", checkpointed)
    assert_same_bits(run("off", CANONICAL), run("eager", CANONICAL, capacities=(HALF,)))
    assert len(calls) == 2 * 2 * len(CANONICAL) * 2 * rig.LAYERS  # in both runs, each call twice


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_training_under_full_recompute_is_eager_with_its_reason(method: str, recomputed: list[str]) -> None:
    full = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": 1}
    graphed = rig.compare_runs(STEPS, config=full)
    per_step = rig.LAYERS if method == "uniform" else 1
    assert recomputed.count("module") == 2 * len(STEPS) * 2 * per_step
    assert graphed.report["eager"] == {"RECOMPUTING": len(STEPS) * 2 * rig.LAYERS}
    assert graphed.report["replays"] == graphed.report["graphs"] == 0
    # Packs keep their own shapes there: no capacity pads them.
    assert [losses.numel() for losses in graphed.steps[0].losses] == [m.physical for m in STEPS[0]]


@pytest.fixture
def seeded(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Megatron's named random streams, safe for graphs or not; puts back what was there."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    before = random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED
    state = torch.cuda.get_rng_state()
    tensor_parallel.model_parallel_cuda_manual_seed(
        77, use_cudagraphable_rng=request.param, force_reset_rng=True
    )
    yield request.param
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = before
    torch.cuda.set_rng_state(state)


class _DropsOut(torch.nn.Module):
    """An MLP whose output loses entries by one of Megatron's named streams."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        from megatron.core import tensor_parallel

        out, bias = self.inner(*args, **kwargs)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(out, 0.3, self.training), bias


@pytest.mark.gpu
@pytest.mark.parametrize("seeded", [False, True], indirect=True, ids=["default", "graph-safe"])
def test_draws_from_megatrons_named_streams_replay_where_those_are_safe_for_graphs(seeded: bool) -> None:
    from megatron.core import tensor_parallel

    runs = []
    for eager in (False, True):
        tensor_parallel.model_parallel_cuda_manual_seed(
            77, use_cudagraphable_rng=seeded, force_reset_rng=True
        )
        runs.append(rig.train(rig.graph_config(), STEPS, eager=eager, prepare=rig.around_mlps(_DropsOut)))
    assert_same_bits(*runs)
    reason = {} if seeded else {"RNG_NOT_GRAPH_SAFE": 3 * 2 * rig.LAYERS}
    assert runs[0].report["eager"] == {"WARMING_UP": 2 * rig.LAYERS, **reason}
    assert runs[0].report["replays"] == (3 * 2 * rig.LAYERS if seeded else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("seeded", [True], indirect=True, ids=["graph-safe"])
@pytest.mark.parametrize("modules", [("core_attn",), ("mlp",)], ids="-".join)
def test_selective_recompute_replays_where_random_streams_are_safe_for_graphs(
    seeded: bool, modules: tuple[str, ...]
) -> None:
    graphed = rig.compare_runs(STEPS, config={**_selective(*modules), "add_bias_linear": False})
    assert graphed.report["replays"] == 3 * 2 * rig.LAYERS and graphed.report["failures"] == []
