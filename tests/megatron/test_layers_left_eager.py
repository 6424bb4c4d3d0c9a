# SPDX-License-Identifier: Apache-2.0
"""One layer that cannot be graphed stays eager, counted; the others replay and no bit changes."""

import functools
from typing import Any

import megatron_rig as rig
import pytest
import torch
from host_rig import FULL
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from same_bits import assert_same_bits
from torch import Tensor

from megagraph.demo.trainer import Trainer

LAYERS = 3


def _mlp(model: Any, index: int = 1) -> Any:
    return model.decoder.layers[index].mlp


@pytest.mark.parametrize(
    ("own", "others", "layers"),
    [
        ("mlp.linear_fc1", "decoder.layers.2.mlp.linear_fc1", 2),
        # Both add to one gradient, in an order of their own; a graph would move the layer's part.
        ("mlp.linear_fc1", "output_layer", 1),
        # Bug: what the block has beside its layers was not asked for its parameters.
        ("pre_mlp_layernorm", "decoder.final_layernorm", 1),
    ],
)
def test_a_layer_that_shares_a_parameter_stays_eager(own: str, others: str, layers: int, caplog: Any) -> None:
    def tie(model: Any) -> None:
        model.get_submodule(others).weight = model.decoder.layers[1].get_submodule(own).weight

    # As many words as the MLP has rows.
    pair = rig.Pair(layers=LAYERS, vocab=4 * rig.OPTIONS.hidden, prepare=tie)
    pair.step(rig.ONE, rig.TWO, times=3)
    eager = {"WARMING_UP": 2 * LAYERS, "SHARED_PARAMETER": 2 * 2 * layers}
    failures = pair.ran(2 * 2 * (LAYERS - layers), failures=layers, **eager)["failures"]
    assert "layer 1" in failures[0] and "SHARED_PARAMETER" in caplog.text
    assert all(f"{own}.weight is used elsewhere too" in failure for failure in failures)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scopes", [(), ("mlp",)])
def test_a_layer_that_one_mode_alone_leaves_eager_replays_in_the_other(scopes: Any, training: bool) -> None:
    """Bug: the graph that its MLP has for evaluations was handed the input of the whole layer."""
    pair = rig.Pair(layers=LAYERS, plugin={"cuda_graph_modules": scopes})
    fails = lambda: rig.is_capturing() and torch.is_grad_enabled() is training  # noqa: E731
    rig.breaks(_mlp(pair.graphed.chunk), fails)
    broken, fine = (pair.step, pair.evaluate) if training else (pair.evaluate, pair.step)
    for _ in range(3):
        fine(rig.ONE)
    assert pair.report()["failures"] == []
    for _ in range(3):
        broken(rig.ONE)
    before = pair.report()
    assert len(before["failures"]) == 1 and before["eager"]["CAPTURE_FAILED"] == 2
    fine(rig.ONE)
    report = pair.report()
    assert report["replays"] == before["replays"] + LAYERS and rig.eager_since(report, before) == {}


def test_a_layer_that_fails_in_each_capture_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: as often as memory had moved."""
    pair = rig.Pair(layers=LAYERS, prepare=lambda model: rig.breaks(_mlp(model)))
    for _ in range(3):
        pair.step(rig.ONE, times=2)
        for trainer in pair.both:
            for param in trainer.chunk.parameters():
                param.data = param.data.clone()
    # Memory that moves a second time costs no eager step.
    eager = {"WARMING_UP": LAYERS, "ADDRESS_MOVED": LAYERS, "CAPTURE_FAILED": 4}
    (failure,) = pair.ran(4 * (LAYERS - 1), failures=1, **eager)["failures"]
    assert all(text in failure for text in ("layer 1", "an injected failure", rig.__file__))
    assert caplog.text.count("CAPTURE_FAILED") == caplog.text.count("an injected failure") == 1


def test_a_layer_that_binds_another_buffer_in_each_call_costs_one_capture(caplog: Any) -> None:
    """Bug: one in each step, of the whole model, whose graphs nobody verified."""

    def binds(model: Any) -> None:
        mlp = _mlp(model)
        mlp.register_buffer("seen", torch.zeros(()))
        rig.changes_output(mlp, lambda out: (setattr(mlp, "seen", mlp.seen + 1), out)[1])

    caplog.set_level("INFO")
    pair = rig.Pair(layers=LAYERS, prepare=binds)
    pair.step(rig.ONE, times=5)
    pair.ran(4 * (LAYERS - 1), failures=1, WARMING_UP=LAYERS, CAPTURE_FAILED=4)
    assert caplog.text.count(": captured ") == 1


def test_a_layer_that_its_calls_change_costs_the_others_nothing_however_few_states_have_graphs(
    caplog: Any,
) -> None:
    """Bug: its warm-up met more states than that, and nothing was captured."""

    def counts(model: Any) -> None:
        mlp = _mlp(model)
        rig.changes_output(mlp, lambda out: (setattr(mlp, "calls", getattr(mlp, "calls", 0) + 1), out)[1])

    pair = rig.Pair(
        layers=LAYERS, plugin={"cuda_graph_max_states": 1, "cuda_graph_warmup_steps": 3}, prepare=counts
    )
    pair.step(rig.ONE, times=5)
    pair.ran(2 * (LAYERS - 1), failures=1, WARMING_UP=3 * LAYERS, CAPTURE_FAILED=2)
    assert "STATE_CHANGED" not in caplog.text


def test_a_capture_that_fails_whole_is_tried_again_only_after_a_change(monkeypatch: Any, caplog: Any) -> None:
    """It leaves a run that never captured. Bug: beside evaluations it was tried and reported in each step."""
    original = GPTModel._preprocess
    tried: list[bool] = []

    @functools.wraps(original)
    def preprocess(model: Any, *args: Any, **kwargs: Any) -> Any:
        hidden_states = kwargs.get("decoder_input")
        if hidden_states is not None and hidden_states.is_meta:  # asked for a capture
            tried.append(torch.is_grad_enabled())
            raise ArithmeticError("an injected failure")
        return original(model, *args, **kwargs)

    pair = rig.Pair(layers=LAYERS)
    monkeypatch.setattr(GPTModel, "_preprocess", preprocess)
    for _ in range(4):  # runs as given, and the reference on canonical packs
        pair.step(FULL, FULL)
        pair.evaluate(FULL)
    report = pair.ran(failures=1, WARMING_UP=3 * LAYERS, CAPTURE_FAILED=3 * 3 * LAYERS)
    assert report["failures"] == ["ArithmeticError: an injected failure"]
    assert len(tried) == 2 and caplog.text.count("Traceback") == 1
    for block in (trainer.chunk.decoder for trainer in pair.both):
        block.layers = torch.nn.ModuleList(reversed(block.layers))
    pair.step(FULL, FULL, times=3)
    assert len(tried) == 3 and pair.report()["failures"] == report["failures"]


def test_what_could_not_be_captured_runs_as_it_was_given(install: rig.Install) -> None:
    """Bug: it ran on canonical packs, which some layers cannot take; nothing is gained by them then."""
    rows: list[int] = []

    def left(trainer: Trainer) -> list[Any]:
        return [rig.step(trainer, [micro]) for micro in (FULL, rig.ONE, rig.TWO)]

    expected = left(rig.ModelTrainer(layers=LAYERS))
    install()
    trainer = rig.ModelTrainer(layers=LAYERS)
    for index in range(LAYERS):
        rig.breaks(_mlp(trainer.chunk, index))
    rig.changes_output(_mlp(trainer.chunk), lambda out: rows.append(out.size(0)) or out)
    for given, ours in zip(expected, left(trainer), strict=True):
        assert_same_bits(given, ours)
    assert rig.report_of(trainer)["eager"] == {"WARMING_UP": LAYERS, "CAPTURE_FAILED": 2 * LAYERS}
    assert rows[-2:] == [rig.ONE.physical, rig.TWO.physical]
    rig.step(trainer, [rig.ONE], eager=True)
    assert rows[-1] == rig.CAPACITY.tokens  # the reference stays on canonical packs


def test_a_layer_that_draws_from_a_stream_no_graph_can_advance_stays_eager(monkeypatch: Any) -> None:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    monkeypatch.setattr(tracker, "states_", {**tracker.states_, "test": torch.zeros(16, dtype=torch.uint8)})
    pair = rig.Pair(layers=LAYERS)

    def draws(out: Tensor) -> Tensor:
        tracker.states_["test"] = tracker.states_["test"] + 1
        return out

    rig.changes_output(_mlp(pair.graphed.chunk), draws)
    pair.step(rig.ONE, rig.TWO, times=3)
    pair.ran(failures=1, WARMING_UP=2 * LAYERS, RNG_NOT_GRAPH_SAFE=2 * 2)
    assert tracker.states_["test"].unique().tolist() == [3 * 2]
    pair.graphed.chunk.decoder.layers[2].note = pair.eager.chunk.decoder.layers[2].note = "other"
    pair.step(rig.ONE, times=2)
    # Nothing of the layer that is no part of it any more.
    assert pair.report()["states"] == ["the first one", "layer 2: note nothing -> 'other'"]
