# SPDX-License-Identifier: Apache-2.0
"""One layer that cannot be graphed stays eager, counted; the others replay and no bit changes."""

import functools
from collections.abc import Callable
from typing import Any

import megatron_rig as rig
import pytest
import torch
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph.demo.trainer import Trainer

LAYERS = 3
# As many rows and documents as the capacity: the backward of attention sums by their number.
FULL = rig.Micro(lengths=(20, 14, 12, 10, 8), seed=2)


def _mlp(trainer: Trainer, index: int = 1) -> Any:
    return trainer.chunk.decoder.layers[index].mlp


def _scale(module: nn.Module, args: object, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return output[0] * 1.5, output[1]


def test_a_layer_with_a_foreign_hook_stays_eager_and_the_rest_replays() -> None:
    """Of whatever kind: test_state_changes.py."""
    pair = rig.Pair(layers=LAYERS)
    for trainer in pair.both:
        _mlp(trainer).register_forward_hook(_scale)
    pair.step(rig.ONE, rig.TWO, times=3)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "FOREIGN_HOOK": 2 * 2}
    assert report["replays"] == 2 * 2 * (LAYERS - 1)
    (failure,) = report["failures"]
    assert "layer 1" in failure and "FOREIGN_HOOK" in failure and "hook" in failure


def test_hooks_on_every_layer_leave_all_of_them_eager_under_their_own_reason() -> None:
    """Bug: with no layer left to capture, calls were counted as CAPTURE_FAILED."""
    pair = rig.Pair(layers=LAYERS)
    for trainer in pair.both:
        for index in range(LAYERS):
            _mlp(trainer, index).register_forward_hook(_scale)
    pair.step(FULL, times=3)  # runs as given, and the reference on a canonical pack
    assert pair.report()["eager"] == {"WARMING_UP": LAYERS, "FOREIGN_HOOK": 2 * LAYERS}


def test_layers_that_share_a_parameter_stay_eager_and_the_rest_replays() -> None:
    def tie(model: Any) -> None:
        layers = model.decoder.layers
        layers[2].mlp.linear_fc1.weight = layers[1].mlp.linear_fc1.weight

    pair = rig.Pair(layers=LAYERS, prepare=tie)
    pair.step(rig.ONE, rig.TWO, times=3)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "SHARED_PARAMETER": 2 * 2 * 2}
    assert report["replays"] == 2 * 2


@pytest.mark.parametrize("owner", ["embedding.word_embeddings", "output_layer"])
def test_a_layer_that_shares_a_parameter_with_what_is_outside_of_the_block_stays_eager(owner: str) -> None:
    """Both add to one gradient, in an order of their own; a graph would move the layer's part."""

    def tie(model: Any) -> None:
        model.decoder.layers[1].mlp.linear_fc1.weight = model.get_submodule(owner).weight

    # As many words as the MLP has rows.
    changes = {"layers": LAYERS, "vocab": 4 * rig.OPTIONS.hidden}
    report = rig.compare_runs([[rig.ONE, rig.TWO]] * 3, prepare=tie, **changes).report
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "SHARED_PARAMETER": 2 * 2}
    assert report["replays"] == 2 * 2 * (LAYERS - 1)
    (failure,) = report["failures"]
    assert "layer 1" in failure and "linear_fc1.weight is used elsewhere too" in failure


def test_a_layer_that_reaches_an_adapter_of_the_model_stays_eager() -> None:
    """Bug: in the step of the capture its gradient was garbage, and later it was lost: no module has it."""

    def adapt(model: Any) -> None:
        adapter = model.adapter = nn.Linear(rig.OPTIONS.hidden, rig.OPTIONS.hidden, bias=False)
        nn.init.normal_(adapter.weight, std=0.02, generator=torch.Generator().manual_seed(3))
        mlp = model.decoder.layers[1].mlp
        forward = mlp.forward

        def adapted(hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            out, bias = forward(hidden, *args, **kwargs)
            return out + adapter(hidden), bias

        mlp.forward = adapted

    report = rig.compare_runs([[rig.ONE, rig.TWO]] * 4, prepare=adapt, layers=LAYERS).report
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "SHARED_PARAMETER": 3 * 2}
    assert report["replays"] == 3 * 2 * (LAYERS - 1)
    (failure,) = report["failures"]
    assert "layer 1" in failure and failure.endswith("that none of its modules has")


def _breaks(trainer: Trainer, when: Callable[[], bool], index: int = 1) -> None:
    """Makes a layer's MLP raise where `when` says so; no hook, so nothing shows it beforehand."""

    def fail(out: Tensor) -> Tensor:
        if when():
            raise ArithmeticError("an injected failure")
        return out

    rig.changes_output(_mlp(trainer, index), fail)


def test_a_layer_that_fails_to_capture_stays_eager_and_no_bit_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = rig.Pair(layers=LAYERS)
    _breaks(pair.graphed, rig.is_capturing)
    pair.step(rig.ONE, rig.TWO, times=4)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "CAPTURE_FAILED": 3 * 2}
    assert report["replays"] == 3 * 2 * (LAYERS - 1)
    (failure,) = report["failures"]
    assert "layer 1" in failure and "an injected failure" in failure and __file__ in failure
    assert "CAPTURE_FAILED" in caplog.text


def test_a_capture_that_fails_as_a_whole_leaves_a_run_that_never_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.models.gpt import GPTModel

    original = GPTModel._preprocess

    @functools.wraps(original)
    def preprocess(model: Any, *args: Any, **kwargs: Any) -> Any:
        hidden_states = kwargs.get("decoder_input")
        if hidden_states is not None and hidden_states.is_meta:  # asked for a capture
            raise ArithmeticError("an injected failure")
        return original(model, *args, **kwargs)

    pair = rig.Pair(layers=LAYERS)
    monkeypatch.setattr(GPTModel, "_preprocess", preprocess)
    pair.step(FULL, FULL, times=4)  # runs as given, and the reference on canonical packs
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "CAPTURE_FAILED": 3 * 2 * LAYERS}
    assert report["failures"] == ["ArithmeticError: an injected failure"]


def test_what_could_not_be_captured_runs_as_it_was_given(install: rig.Install) -> None:
    """Bug: it ran on canonical packs, which some layers cannot take; nothing is gained by them then."""
    rows: list[int] = []

    def left(trainer: Trainer) -> list[Any]:
        return [rig.step(trainer, [micro]) for micro in (FULL, rig.ONE, rig.TWO)]

    alone = rig.plain(layers=LAYERS)
    expected = left(alone)
    install()
    trainer = rig.plain(layers=LAYERS)
    for index in range(LAYERS):
        _breaks(trainer, rig.is_capturing, index)
    rig.changes_output(_mlp(trainer), lambda out: rows.append(out.size(0)) or out)
    for given, ours in zip(expected, left(trainer), strict=True):
        assert_same_bits(given, ours)
    assert rig.report_of(trainer)["eager"] == {"WARMING_UP": LAYERS, "CAPTURE_FAILED": 2 * LAYERS}
    assert rows[-2:] == [rig.ONE.physical, rig.TWO.physical]
    rig.step(trainer, [rig.ONE], eager=True)
    assert rows[-1] == rig.CAPACITY.tokens  # the reference stays on canonical packs


def test_a_failure_of_the_evaluation_capture_costs_training_no_graph() -> None:
    pair = rig.Pair(layers=LAYERS)
    _breaks(pair.graphed, lambda: rig.is_capturing() and not torch.is_grad_enabled())
    pair.step(rig.ONE, times=2)
    pair.evaluate(rig.ONE)
    pair.step(rig.ONE)
    pair.evaluate(rig.ONE)
    pair.step(rig.TWO)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "CAPTURE_FAILED": 1}
    assert report["replays"] == 3 * LAYERS + (LAYERS - 1)


def test_a_layer_that_draws_from_a_stream_no_graph_can_advance_stays_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    monkeypatch.setattr(tracker, "states_", {**tracker.states_, "test": torch.zeros(16, dtype=torch.uint8)})
    pair = rig.Pair(layers=LAYERS)

    def draws(out: Tensor) -> Tensor:
        tracker.states_["test"] = tracker.states_["test"] + 1
        return out

    rig.changes_output(_mlp(pair.graphed), draws)
    pair.step(rig.ONE, rig.TWO, times=3)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "RNG_NOT_GRAPH_SAFE": 2 * 2}
    assert tracker.states_["test"].unique().tolist() == [3 * 2]
