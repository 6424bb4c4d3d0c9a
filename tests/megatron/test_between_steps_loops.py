# SPDX-License-Identifier: Apache-2.0
"""Loops that are not one schedule call a step: evaluation, accumulation, errors, other settings."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from megatron_rig import (
    LAYERS,
    ONE,
    OPTIONS,
    OTHER,
    TWO,
    Micro,
    Pair,
    Step,
    grads,
    is_capturing,
    report_of,
    schedule,
    step,
)
from same_bits import assert_same_bits

from megagraph.bank.bank import Bank
from megagraph.demo.trainer import Trainer

TOO_LARGE = Micro(lengths=(60, 20), seed=3)


@pytest.fixture(autouse=True)
def same_settings() -> Iterator[None]:
    """Numeric settings that a test changes are put back."""
    yield
    torch.set_float32_matmul_precision("highest")


def test_evaluations_of_other_lengths_between_steps_replay(pair: Pair) -> None:
    counts = (3, 1, 5, 2, 4)
    for index, count in enumerate(counts):
        pair.step(*[Micro(lengths=(5 + i, 11 + index), seed=i) for i in range(1 + index % 3)])
        pair.evaluate(*[Micro(lengths=(7 + i, 20 - index), seed=index) for i in range(count)])
        if index == 2:
            pair.evaluate(TOO_LARGE, ONE)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": (1 + counts[0]) * LAYERS, "TOO_MANY_TOKENS": LAYERS}
    assert report["replays"] == (2 + 3 + 1 + 2 + sum(counts[1:]) + 1) * LAYERS
    assert report["graphs"] == (2 + 1) * LAYERS


@contextmanager
def _unsynchronized(trainer: Trainer) -> Iterator[None]:
    """No gradient is reduced inside, as a host says it that makes several schedule calls a step."""
    config = trainer.chunk.config
    before = config.no_sync_func, config.finalize_model_grads_func
    config.no_sync_func = config.finalize_model_grads_func = None
    try:
        with trainer.model.no_sync():
            yield
    finally:
        config.no_sync_func, config.finalize_model_grads_func = before


def _accumulate(trainer: Trainer, calls: list[list[Micro]], *, reduces_once: bool = False) -> Step:
    """Several schedule calls before one optimizer step, with no gradient zeroed in between."""
    trainer.zero_grad()
    losses = []
    for index, micros in enumerate(calls):
        waits = reduces_once and index < len(calls) - 1
        with _unsynchronized(trainer) if waits else nullcontext():
            losses += schedule(trainer.model, micros, len(micros), trainer.device)
    left = Step(losses=losses, grads=grads(trainer.chunk))
    trainer.update()
    return left


OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 10_000}


@pytest.mark.parametrize(
    "ddp, reduces_once",
    [({}, False), ({}, True), (OVERLAP, True)],  # with overlap, Megatron itself refuses more than one
    ids=["reduced-each-time", "reduced-once", "overlapped-once"],
)
def test_gradients_of_several_schedule_calls_add_up_as_in_eager(
    ddp: dict[str, Any], reduces_once: bool
) -> None:
    pair = Pair(ddp=ddp)
    calls = [[ONE, TWO], [OTHER], [TWO, OTHER, ONE]]
    for index in range(4):
        both = pair.each(lambda trainer: _accumulate(trainer, calls, reduces_once=reduces_once))
        assert_same_bits(*both, f"step {index}")
    alone = step(pair.eager, calls[-1], update=False, eager=True).grads  # or the last call's alone would do
    assert not any(torch.equal(grad, alone[name]) for name, grad in both[1].grads.items())
    report = pair.report()
    # The first schedule call is the warm-up; each is a boundary.
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS}
    assert report["replays"] == (4 * 6 - 2) * LAYERS


def test_a_loop_that_never_calls_zero_grad_of_the_optimizer_trains_as_in_eager(pair: Pair) -> None:
    """Megatron's FP32 optimizer leaves `main_grad` itself in `.grad`: eager adds the next gradient twice."""

    def work(trainer: Trainer) -> Step:
        trainer.model.zero_grad_buffer()
        losses = schedule(trainer.model, [ONE, TWO, OTHER], 3, trainer.device)
        left = Step(losses=losses, grads=grads(trainer.chunk))
        trainer.update()
        return left

    for index in range(4):
        assert_same_bits(*pair.each(work), f"step {index}")
        pair.evaluate(ONE, TWO)
    report = pair.report()
    first_of_steps = {} if OPTIONS.bf16 else {"PARAMETERS_CHANGED": 3 * LAYERS}
    assert report["eager"] == {"WARMING_UP": (3 + 2) * LAYERS, **first_of_steps}
    assert report["replays"] == (3 * (3 + 2) - (0 if OPTIONS.bf16 else 3)) * LAYERS


def test_deterministic_mode_switched_on_later_costs_one_eager_step(pair: Pair) -> None:
    """Bug: after a lasting change nothing was captured again, and every later step ran eager."""
    torch.use_deterministic_algorithms(False)
    for _ in range(2):
        for trainer in pair.both:  # bits may differ here: nothing is compared or updated
            step(trainer, [ONE], update=False, eager=trainer is pair.eager)
    torch.use_deterministic_algorithms(True)
    pair.step(TWO, OTHER, times=4)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": LAYERS, "NUMERICS_CHANGED": 2 * LAYERS}
    assert report["replays"] == (1 + 3 * 2) * LAYERS
    assert report["graphs"] == 2 * 2 * LAYERS and report["failures"] == []


def test_what_cannot_be_captured_under_other_settings_is_tried_once(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: it was tried again before every step."""
    captures = []

    def capture(bank: Bank, *args: Any, original: Any = Bank.capture) -> None:
        captures.append(bank)
        original(bank, *args)

    monkeypatch.setattr(Bank, "capture", capture)
    for layer in trainer.chunk.decoder.layers:

        def refusing(*args: Any, forward: Any = layer.forward, **kwargs: Any) -> Any:
            if is_capturing() and torch.get_float32_matmul_precision() == "high":
                raise RuntimeError("not under these settings")
            return forward(*args, **kwargs)

        layer.forward = refusing
    step(trainer, [ONE], times=2)
    torch.set_float32_matmul_precision("high")
    try:
        step(trainer, [ONE], times=4)
    finally:
        torch.set_float32_matmul_precision("highest")
    step(trainer, [ONE])
    report = report_of(trainer)
    assert len(captures) == 2  # under the first settings, and once under the others
    assert report["eager"] == {"WARMING_UP": LAYERS, "NUMERICS_CHANGED": LAYERS, "CAPTURE_FAILED": 3 * LAYERS}
    assert report["replays"] == 2 * LAYERS


def test_a_precision_that_nobody_has_set_is_the_highest(pair: Pair) -> None:
    """Bug: back from TF32, the first graphs were taken for those of other settings."""
    torch.backends.cuda.matmul.fp32_precision = "none"
    pair.step(ONE, times=2)
    torch.set_float32_matmul_precision("high")
    torch.set_float32_matmul_precision("highest")
    pair.step(TWO)
    assert pair.report()["eager"] == {"WARMING_UP": LAYERS}


def test_settings_that_come_back_find_their_graphs_again(pair: Pair) -> None:
    pair.step(ONE, times=2)
    for _ in range(3):
        torch.set_float32_matmul_precision("high")
        pair.step(TWO, times=2)
        torch.set_float32_matmul_precision("highest")
        pair.step(OTHER, times=2)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": LAYERS, "NUMERICS_CHANGED": LAYERS}
    assert report["replays"] == (1 + 3 * 4 - 1) * LAYERS
    assert report["graphs"] == 2 * 2 * LAYERS


def test_an_evaluation_under_settings_of_its_own_replays(pair: Pair) -> None:
    """It is captured at a boundary of its own, and so under its own settings alone."""
    for _ in range(6):
        pair.step(ONE)
        torch.set_float32_matmul_precision("high")
        pair.evaluate(TWO, OTHER)
        torch.set_float32_matmul_precision("highest")
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": (1 + 2) * LAYERS}
    assert report["replays"] == (5 + 5 * 2) * LAYERS
    assert report["graphs"] == (2 + 1) * LAYERS


def test_settings_that_change_inside_a_step_are_obeyed_at_once(pair: Pair) -> None:
    pair.step(ONE, TWO, times=2)

    def changing() -> Iterator[Micro]:
        yield ONE
        torch.set_float32_matmul_precision("high")
        yield TWO

    def work(trainer: Trainer) -> Step:
        trainer.zero_grad()
        try:
            losses = schedule(trainer.model, changing(), 2, trainer.device)
        finally:
            torch.set_float32_matmul_precision("highest")
        return Step(losses=losses, grads=grads(trainer.chunk))

    for _ in range(2):
        assert_same_bits(*pair.each(work))
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "NUMERICS_CHANGED": 2 * LAYERS}
    assert report["replays"] == (2 + 2) * LAYERS
