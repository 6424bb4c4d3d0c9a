# SPDX-License-Identifier: Apache-2.0
"""Recompute and dropout: what runs again or draws random numbers inside a captured layer."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import megatron_rig as rig
import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_layer import TransformerLayer
from moe_rig import recompute
from notes import noting
from rope_rig import canonical, run
from same_bits import assert_same_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megagraph._C import Capacity
from megagraph.demo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("recompute_on_cpu")

STEPS = [[rig.ONE, rig.TWO], [rig.OTHER, rig.ONE], [rig.TWO, rig.TWO]]
REPLAYS = 2 * 2 * rig.LAYERS  # if everything after the warm-up replays
HALF = Capacity(tokens=64, num_seqs=5, max_seqlen=32)
CANONICAL = [
    [canonical((10, 30, 24), capacity=HALF, seed=i), canonical((16, 16, 32), capacity=HALF, seed=50 + i)]
    for i in range(3)
]


@pytest.fixture
def recomputed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Notes each time that one of Megatron's checkpoints runs its part of the model again."""
    return noting(monkeypatch, random.CheckpointFunction, "backward", wrap=staticmethod)


@pytest.mark.parametrize(
    ("modules", "dropout"), [(("core_attn", "mlp"), 0.0), (("core_attn",), 0.2), (("mlp",), 0.2)]
)
def test_selective_recompute_inside_a_layer_has_eager_bits(
    modules: tuple[str, ...], dropout: float, recomputed: list[Any]
) -> None:
    # Without biases: Megatron's checkpoint of an MLP that returns one recurses without end.
    common = {"hidden_dropout": dropout, "add_bias_linear": False}
    graphed = rig.compare_runs(STEPS, config={**recompute(*modules), **common})
    assert len(recomputed) >= len(STEPS) * 2 * rig.LAYERS * len(modules)
    if dropout and "mlp" in modules:  # Megatron's rule R17, though the dropout lies behind the MLP
        assert graphed.report["eager"] == {"SCOPE_UNSUPPORTED": len(STEPS) * 2 * rig.LAYERS}
        return
    if rig.ON_GPU:  # where a checkpoint reads a stream's state, which captures allow of safe trackers alone
        assert set(graphed.report["eager"]) <= {"WARMING_UP", "CAPTURE_FAILED", "RNG_NOT_GRAPH_SAFE"}
    else:
        rig.ran(graphed.report, REPLAYS, WARMING_UP=2 * rig.LAYERS)
    assert_same_bits(graphed, rig.train(rig.graph_config(), STEPS, config=common, eager=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_a_host_recomputes_rotate_as_they_did(use_reentrant: bool, monkeypatch: Any) -> None:
    """In the backward, outside of any forward of ours."""
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


@pytest.fixture
def tracker_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], Any]]:
    """Makes Megatron's tracker anew, of generators or of saved states; puts back what was there."""
    for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):
        monkeypatch.setattr(random, name, getattr(random, name))
    state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def make(graph_safe: bool) -> Any:
        if torch.cuda.is_available():
            tensor_parallel.model_parallel_cuda_manual_seed(
                77, use_cudagraphable_rng=graph_safe, force_reset_rng=True
            )
            return tensor_parallel.get_cuda_rng_tracker()
        monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", random.CudaRNGStatesTracker())
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.set_states({"model-parallel-rng": torch.Generator().manual_seed(77)})
        return tracker

    yield make
    if state is not None:
        torch.cuda.set_rng_state(state)


class _Drops(torch.nn.Module):
    """An MLP that loses entries of its input, by a stream of Megatron's tracker if it is told so."""

    def __init__(self, inner: torch.nn.Module, *, by_name: bool = False) -> None:
        super().__init__()
        self.inner, self.dropout, self.by_name = inner, torch.nn.Dropout(0.3), by_name

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        named = self.by_name and hidden.is_cuda
        with tensor_parallel.get_cuda_rng_tracker().fork() if named else contextlib.nullcontext():
            hidden = self.dropout(hidden)
        return self.inner(hidden, *args, **kwargs)


DROPS, DROPS_BY_NAME = rig.around_mlps(_Drops), rig.around_mlps(partial(_Drops, by_name=True))


def _graphed_and_eager(
    steps: list[list[rig.Micro]], new_tracker: Callable[[], Any], **given: Any
) -> dict[str, Any]:
    """The report of a run that has eager's bits, each with random streams of its own."""
    runs = []
    for eager in (False, True):
        new_tracker()
        runs.append(rig.train(rig.graph_config(), steps, eager=eager, **given))
    assert_same_bits(*runs)
    return runs[0].report


@pytest.mark.gpu
@pytest.mark.parametrize("graph_safe", [False, True], ids=["states", "generators"])
def test_draws_from_megatrons_named_streams_replay_where_those_are_safe_for_graphs(
    graph_safe: bool, tracker_of: Callable[[bool], Any]
) -> None:
    report = _graphed_and_eager(STEPS, lambda: tracker_of(graph_safe), prepare=DROPS_BY_NAME)
    refused = {} if graph_safe else {"RNG_NOT_GRAPH_SAFE": REPLAYS, "failures": rig.LAYERS}
    rig.ran(report, REPLAYS if graph_safe else 0, WARMING_UP=2 * rig.LAYERS, **refused)


@pytest.mark.gpu
@pytest.mark.parametrize("modules", [("core_attn",), ("mlp",)], ids="-".join)
def test_selective_recompute_replays_where_random_streams_are_safe_for_graphs(
    modules: tuple[str, ...], tracker_of: Callable[[bool], Any]
) -> None:
    tracker_of(True)
    graphed = rig.compare_runs(STEPS, config=recompute(*modules, add_bias_linear=False))
    assert graphed.report["replays"] == REPLAYS and graphed.report["failures"] == []


@pytest.mark.parametrize("replaces", ["its generators", "the tracker"])
def test_generators_that_are_replaced_between_steps_are_captured_anew(
    replaces: str, tracker_of: Callable[[bool], Any]
) -> None:
    """The graphs drew from the former ones: a checkpoint that was loaded changed no mask."""
    tracker: Any = None

    def make() -> None:
        nonlocal tracker
        tracker = tracker_of(True)

    def replace(_trainer: Trainer) -> None:
        if replaces == "the tracker":
            make()
            return
        others = {name: type(it)(it.device).manual_seed(5) for name, it in tracker.get_states().items()}
        tracker.set_states(others)

    given = {"around": rig.at(3, replace), "prepare": DROPS_BY_NAME}
    report = _graphed_and_eager([[rig.ONE, rig.TWO]] * 5, make, **given)
    calls = 2 * rig.LAYERS
    rig.ran(report, 3 * calls, WARMING_UP=calls, ADDRESS_MOVED=calls)


@pytest.mark.gpu
@pytest.mark.parametrize("graph_safe", [False, True], ids=["states", "generators"])
def test_a_recomputed_region_around_plain_dropout_has_eager_bits(
    graph_safe: bool, tracker_of: Callable[[bool], Any]
) -> None:
    """Its backward graph drew another mask than its forward: every gradient was wrong, and nothing said so.
    Where generators are swapped and not their states, eager draws another mask too. Of such a layer the graph
    draws the same, unless Megatron leaves the recompute out while it is told of a capture."""
    given: dict[str, Any] = {"config": recompute("mlp", add_bias_linear=False)}
    report = _graphed_and_eager(STEPS, lambda: tracker_of(graph_safe), prepare=DROPS, **given)
    # Later releases do not recompute while they are told of a capture: states that are set back tell no
    # difference then, and generators are drawn from once less.
    is_refused = graph_safe == hasattr(random, "_get_share_storage")
    refused = {"RNG_NOT_GRAPH_SAFE": REPLAYS, "failures": rig.LAYERS} if is_refused else {}
    rig.ran(report, 0 if is_refused else REPLAYS, WARMING_UP=2 * rig.LAYERS, **refused)
