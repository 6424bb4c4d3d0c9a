# SPDX-License-Identifier: Apache-2.0
"""One layer that cannot be graphed stays eager, counted; the others replay and no bit changes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_rig import (
    CAPACITY,
    ONE,
    OPTIONS,
    TWO,
    Install,
    Micro,
    Pair,
    changes_output,
    compare_runs,
    is_capturing,
    plain,
    report_of,
    step,
)
from same_bits import assert_same_bits
from torch import Tensor, nn

import megagraph
from megagraph.demo.trainer import Trainer

LAYERS = 3
# As many rows and documents as the capacity: the backward of attention sums by their number.
FULL = Micro(lengths=(20, 14, 12, 10, 8), seed=2)


def _mlp(trainer: Trainer, index: int = 1) -> Any:
    return trainer.chunk.decoder.layers[index].mlp


def _scale(module: nn.Module, args: object, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return output[0] * 1.5, output[1]


_HOOKS: dict[str, Callable[[Trainer], Any]] = {
    "forward hook": lambda trainer: _mlp(trainer).register_forward_hook(_scale),
    "forward pre-hook": lambda trainer: _mlp(trainer).register_forward_pre_hook(lambda module, args: None),
    "backward hook": lambda trainer: _mlp(trainer).register_full_backward_hook(lambda *args: None),
    "gradient hook": lambda trainer: _mlp(trainer).linear_fc1.weight.register_hook(lambda grad: grad * 2),
    "accumulation hook": lambda trainer: _mlp(trainer).linear_fc1.weight.register_post_accumulate_grad_hook(
        lambda param: None
    ),
}


@pytest.mark.parametrize("hook", _HOOKS)
def test_a_layer_with_a_foreign_hook_stays_eager_and_the_rest_replays(hook: str) -> None:
    pair = Pair(layers=LAYERS)
    for trainer in pair.both:
        _HOOKS[hook](trainer)
    pair.step(ONE, TWO, times=3)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "FOREIGN_HOOK": 2 * 2}
    assert report["replays"] == 2 * 2 * (LAYERS - 1)
    (failure,) = report["failures"]
    assert "layer 1" in failure and "FOREIGN_HOOK" in failure and "hook" in failure


def test_hooks_on_every_layer_leave_all_of_them_eager_under_their_own_reason() -> None:
    """Bug: with no layer left to capture, calls were counted as CAPTURE_FAILED."""
    pair = Pair(layers=LAYERS)
    for trainer in pair.both:
        for index in range(LAYERS):
            _mlp(trainer, index).register_forward_hook(_scale)
    pair.step(FULL, times=3)  # runs as given, and the reference on a canonical pack
    assert pair.report()["eager"] == {"WARMING_UP": LAYERS, "FOREIGN_HOOK": 2 * LAYERS}


def test_a_hook_that_comes_after_the_capture_is_obeyed() -> None:
    """Bug: hooks were looked for at the capture only, and one set later never ran."""
    pair = Pair(layers=LAYERS)
    pair.step(ONE, times=2)
    hooks = [_mlp(trainer).register_forward_hook(_scale) for trainer in pair.both]
    pair.step(ONE, times=3)
    assert pair.report()["eager"]["FOREIGN_HOOK"] > 0
    for hook in hooks:
        hook.remove()
    pair.step(TWO, times=3)
    assert pair.report()["replays"] >= (1 + 1) * LAYERS


def test_layers_that_share_a_parameter_stay_eager_and_the_rest_replays() -> None:
    def tie(model: Any) -> None:
        layers = model.decoder.layers
        layers[2].mlp.linear_fc1.weight = layers[1].mlp.linear_fc1.weight

    pair = Pair(layers=LAYERS, prepare=tie)
    pair.step(ONE, TWO, times=3)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "SHARED_PARAMETER": 2 * 2 * 2}
    assert report["replays"] == 2 * 2


@pytest.mark.parametrize("owner", ["embedding.word_embeddings", "output_layer"])
def test_a_layer_that_shares_a_parameter_with_what_is_outside_of_the_block_stays_eager(owner: str) -> None:
    """Both add to one gradient, in an order of their own; a graph would move the layer's part."""

    def tie(model: Any) -> None:
        model.decoder.layers[1].mlp.linear_fc1.weight = model.get_submodule(owner).weight

    # As many words as the MLP has rows.
    changes = {"layers": LAYERS, "vocab": 4 * OPTIONS.hidden}
    report = compare_runs([[ONE, TWO]] * 3, prepare=tie, **changes).report
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "SHARED_PARAMETER": 2 * 2}
    assert report["replays"] == 2 * 2 * (LAYERS - 1)
    (failure,) = report["failures"]
    assert "layer 1" in failure and "linear_fc1.weight is used elsewhere too" in failure


def _breaks(trainer: Trainer, when: Callable[[], bool], index: int = 1) -> None:
    """Makes a layer's MLP raise where `when` says so; no hook, so nothing shows it beforehand."""

    def fail(out: Tensor) -> Tensor:
        if when():
            raise ArithmeticError("an injected failure")
        return out

    changes_output(_mlp(trainer, index), fail)


@pytest.mark.parametrize("index", range(LAYERS))
def test_a_layer_that_fails_to_capture_stays_eager_and_no_bit_changes(
    index: int, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(layers=LAYERS)
    _breaks(pair.graphed, is_capturing, index)
    pair.step(ONE, TWO, times=4)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "CAPTURE_FAILED": 3 * 2}
    assert report["replays"] == 3 * 2 * (LAYERS - 1)
    (failure,) = report["failures"]
    assert f"layer {index}" in failure and "an injected failure" in failure and __file__ in failure
    assert "CAPTURE_FAILED" in caplog.text


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if is_capturing():
            raise ArithmeticError("an injected failure")
        return grad


def test_a_layer_whose_backward_fails_to_capture_stays_eager_and_no_bit_changes() -> None:
    pair = Pair(layers=LAYERS)
    mlp = _mlp(pair.graphed)
    original = mlp.forward
    mlp.forward = lambda x, *args, **kwargs: original(_FailsBackward.apply(x), *args, **kwargs)
    pair.step(ONE, TWO, times=3)
    assert pair.report()["eager"] == {"WARMING_UP": 2 * LAYERS, "CAPTURE_FAILED": 2 * 2}


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

    pair = Pair(layers=LAYERS)
    monkeypatch.setattr(GPTModel, "_preprocess", preprocess)
    pair.step(FULL, FULL, times=4)  # runs as given, and the reference on canonical packs
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "CAPTURE_FAILED": 3 * 2 * LAYERS}
    assert report["failures"] == ["ArithmeticError: an injected failure"]


def test_what_could_not_be_captured_runs_as_it_was_given(install: Install) -> None:
    """Bug: it ran on canonical packs, which some layers cannot take; nothing is gained by them then."""
    rows: list[int] = []

    def left(trainer: Trainer) -> list[Any]:
        return [step(trainer, [micro]) for micro in (FULL, ONE, TWO)]

    alone = plain(layers=LAYERS)
    expected = left(alone)
    install()
    trainer = plain(layers=LAYERS)
    for index in range(LAYERS):
        _breaks(trainer, is_capturing, index)
    changes_output(_mlp(trainer), lambda out: rows.append(out.size(0)) or out)
    for given, ours in zip(expected, left(trainer), strict=True):
        assert_same_bits(given, ours)
    assert report_of(trainer)["eager"] == {"WARMING_UP": LAYERS, "CAPTURE_FAILED": 2 * LAYERS}
    assert rows[-2:] == [ONE.physical, TWO.physical]
    step(trainer, [ONE], eager=True)
    assert rows[-1] == CAPACITY.tokens  # the reference stays on canonical packs


def test_a_failure_of_the_evaluation_capture_costs_training_no_graph() -> None:
    pair = Pair(layers=LAYERS)
    _breaks(pair.graphed, lambda: is_capturing() and not torch.is_grad_enabled())
    pair.step(ONE, times=2)
    pair.evaluate(ONE)
    pair.step(ONE)
    pair.evaluate(ONE)
    pair.step(TWO)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "CAPTURE_FAILED": 1}
    assert report["replays"] == 3 * LAYERS + (LAYERS - 1)


def test_a_layer_that_draws_from_a_stream_no_graph_can_advance_stays_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    monkeypatch.setattr(tracker, "states_", {**tracker.states_, "test": torch.zeros(16, dtype=torch.uint8)})
    pair = Pair(layers=LAYERS)

    def draws(out: Tensor) -> Tensor:
        tracker.states_["test"] = tracker.states_["test"] + 1
        return out

    changes_output(_mlp(pair.graphed), draws)
    pair.step(ONE, TWO, times=3)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "RNG_NOT_GRAPH_SAFE": 2 * 2}
    assert tracker.states_["test"].unique().tolist() == [3 * 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replayed CUDA graph runs no Python")
def test_an_error_of_a_layer_at_replay_is_raised_and_the_next_steps_are_right() -> None:
    pair = Pair(layers=LAYERS)
    broken = [False]
    for trainer in pair.both:
        _breaks(trainer, lambda: broken[0])
    pair.step(ONE, times=2)
    broken[0] = True
    for trainer in pair.both:
        with pytest.raises(ArithmeticError, match="an injected failure"):
            step(trainer, [TWO], eager=trainer is pair.eager)
    broken[0] = False
    pair.step(ONE, TWO, times=2)
    assert set(pair.report()["eager"]) == {"WARMING_UP"}


def test_a_run_with_a_failed_capture_leaves_the_random_streams_of_one_that_never_captured() -> None:
    compare_runs([[ONE, TWO]] * 4, config={"hidden_dropout": 0.1})


def test_two_layers_may_fail_for_different_reasons_and_both_are_reported(install: Install) -> None:
    install()
    trainer = plain(layers=LAYERS)
    _mlp(trainer, 0).register_forward_hook(_scale)
    _breaks(trainer, is_capturing, 2)
    step(trainer, [ONE], times=3)
    report = report_of(trainer)
    assert report["eager"] == {"WARMING_UP": LAYERS, "FOREIGN_HOOK": 2, "CAPTURE_FAILED": 2}
    assert ["layer 0" in report["failures"][0], "layer 2" in report["failures"][1]] == [True, True]
    assert not megagraph.is_cuda_graph_skipped()
