# SPDX-License-Identifier: Apache-2.0
"""Evaluation, moved and frozen parameters, settings, suspension, accumulation: what happens between steps."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from megatron_rig import (
    LAYERS,
    ONE,
    OPTIONS,
    OTHER,
    TWO,
    Install,
    Micro,
    Pair,
    Step,
    compare_runs,
    evaluate,
    forward,
    grads,
    graph_config,
    is_capturing,
    report_of,
    schedule,
    step,
    train,
)
from same_bits import assert_same_bits

import megagraph
from megagraph.bank.bank import Bank
from megagraph.demo.trainer import Trainer


def test_evaluation_is_graphed_when_it_comes_again(pair: Pair) -> None:
    """At the first boundary in its modes after it was seen; training steps in between pass it over."""
    pair.step(ONE, times=2)
    pair.evaluate(ONE, OTHER)
    assert pair.report()["eager"] == {"WARMING_UP": 3 * LAYERS}
    pair.step(TWO)
    assert pair.report()["graphs"] == 2 * LAYERS
    pair.evaluate(TWO, OTHER)
    graphs = pair.report()["graphs"]
    pair.step(OTHER)
    pair.evaluate(ONE)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 3 * LAYERS}
    assert report["replays"] == (1 + 1 + 2 + 1 + 1) * LAYERS
    assert graphs == report["graphs"] == (2 + 1) * LAYERS


def test_evaluation_leaves_gradients_and_the_models_mode_alone(trainer: Trainer) -> None:
    for _ in range(2):
        before = step(trainer, [ONE], update=False).grads
        evaluate(trainer, [TWO])
        after = dict(trainer.named_main_grads())
        assert all(torch.equal(grad, after[name]) for name, grad in before.items())
        assert all(module.training for module in trainer.model.modules())


def _freeze(pattern: str) -> Callable[[torch.nn.Module], None]:
    def change(model: torch.nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(not re.search(pattern, name))

    return change


FROZEN = ("layers.0.", "layers.1.", "embedding|layers.0.", "decoder.layers", "embedding|decoder.layers")


@pytest.mark.parametrize("pattern", [*FROZEN, "(?<!bias)$", "linear_qkv|linear_fc1.weight"])
def test_frozen_parameters_are_graphed_with_eager_bits(pattern: str) -> None:
    pair = Pair(prepare=_freeze(pattern))
    pair.step(ONE, TWO, times=4)
    frozen = [name for name, param in pair.graphed.chunk.named_parameters() if not param.requires_grad]
    assert frozen and not any(hasattr(pair.graphed.chunk.get_parameter(name), "main_grad") for name in frozen)
    report = pair.report()
    assert report["replays"] == 3 * 2 * LAYERS and report["failures"] == []


def test_parameters_frozen_or_thawed_later_cost_one_eager_step(pair: Pair) -> None:
    pair.step(ONE, times=2)
    for requires_grad in (False, True):
        for trainer in pair.both:
            trainer.chunk.decoder.layers[1].mlp.linear_fc1.weight.requires_grad_(requires_grad)
        pair.step(TWO, times=3)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": LAYERS, "PARAMETERS_CHANGED": 2 * LAYERS}
    assert report["replays"] == (1 + 2 + 2) * LAYERS


def _move_weights(trainer: Trainer) -> list[torch.Tensor]:
    """Moves every parameter; what reads the old place from now on reads NaN."""
    old = [param.data for param in trainer.chunk.parameters()]
    for param, tensor in zip(trainer.chunk.parameters(), old, strict=True):
        param.data = tensor.clone()
        tensor.fill_(float("nan"))
    return old


def _move_main_grads(trainer: Trainer, *, in_place: bool = False) -> list[torch.Tensor]:
    """Moves every main gradient out of the DDP's buffer; all objects may stay the same ones."""
    old = [param.main_grad.detach() for param in trainer.chunk.parameters()]
    for param, grad in zip(trainer.chunk.parameters(), old, strict=True):
        if in_place:
            param.main_grad.data = torch.zeros_like(grad)
        else:
            param.main_grad = torch.zeros_like(grad)
        grad.fill_(float("nan"))
    return old


@pytest.mark.parametrize("move", [_move_weights, _move_main_grads, partial(_move_main_grads, in_place=True)])
@pytest.mark.parametrize("is_suspended", [False, True], ids=["running", "suspended"])
def test_moved_memory_is_never_replayed_and_is_captured_again(
    move: Callable[[Trainer], list[torch.Tensor]], is_suspended: bool, pair: Pair
) -> None:
    """One step runs eager, unless the host has said that it moves memory."""
    pair.step(ONE, TWO, times=3)  # from the second replayed step on, a hash alone is compared
    if is_suspended:
        megagraph.suspend()
    held = [move(trainer) for trainer in pair.both]
    if is_suspended:
        megagraph.resume()

    def zero() -> None:
        for trainer in pair.both:
            for param in trainer.chunk.parameters():
                param.main_grad.zero_()

    for _ in range(3):
        zero()
        pair.step(TWO, OTHER)
    report = pair.report()
    moved = {} if is_suspended else {"ADDRESS_MOVED": 2 * LAYERS}
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, **moved}
    assert report["replays"] == (4 + 6) * LAYERS - sum(moved.values())
    assert len(held[0]) == len(held[1])


def test_a_call_outside_of_any_schedule_never_replays_moved_memory(trainer: Trainer) -> None:
    """Bug: addresses are looked at before a schedule only, so a bare call replayed on the old ones."""
    with torch.no_grad():
        forward(trainer.model.eval(), ONE, trainer.device)
    for _ in range(2):
        evaluate(trainer, [ONE])
    replays = report_of(trainer)["replays"]
    held = _move_weights(trainer)
    trainer.model.eval()
    with torch.no_grad():
        forward(trainer.model, ONE, trainer.device)
    assert held and report_of(trainer)["replays"] == replays
    assert report_of(trainer)["eager"]["ADDRESS_MOVED"] == LAYERS


def test_suspended_models_run_eager_and_replay_again_after_resume(pair: Pair) -> None:
    """Nothing is captured meanwhile."""
    pair.step(ONE)
    megagraph.suspend()
    pair.step(ONE, times=2)
    assert pair.report()["graphs"] == 0
    megagraph.resume()
    pair.step(ONE)
    assert pair.report()["graphs"] == 2 * LAYERS
    megagraph.suspend()
    pair.step(TWO, times=2)
    pair.evaluate(TWO)
    megagraph.resume()
    pair.step(OTHER, times=2)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": LAYERS, "SUSPENDED": 5 * LAYERS}
    assert report["replays"] == 3 * LAYERS


def test_packs_that_run_eager_push_no_graphs_tables_out(trainer: Trainer) -> None:
    """Bug: Megatron keeps 32 rotary tables; after an eviction every call was SIGNATURE_CHANGED."""
    step(trainer, [ONE], times=2)
    evaluate(trainer, [Micro(lengths=(65 + i,)) for i in range(40)])
    step(trainer, [ONE])
    assert "SIGNATURE_CHANGED" not in report_of(trainer)["eager"]
    assert report_of(trainer)["replays"] == 2 * LAYERS


def test_a_model_called_before_its_first_step_loses_no_graph(pair: Pair) -> None:
    with torch.no_grad():
        forward(pair.graphed.model, ONE, pair.graphed.device)
    pair.step(ONE, times=3)
    reports = megagraph.reports()
    assert max(report["replays"] for report in reports) == 2 * LAYERS


def test_hidden_dropout_has_eager_bits_or_a_counted_reason() -> None:
    steps = [[ONE, TWO], [OTHER, ONE], [TWO, TWO], [ONE, OTHER]]
    graphed = compare_runs(steps, config={"hidden_dropout": 0.2})
    report = graphed.report
    assert report["replays"] + report["eager"].get("RNG_NOT_GRAPH_SAFE", 0) == 3 * 2 * LAYERS
    without = train(graph_config(), steps)
    assert not torch.equal(without.steps[0].losses[0], graphed.steps[0].losses[0])


def test_two_models_in_one_process_each_have_their_own_graphs_and_bits(install: Install) -> None:
    install()
    alone, other = Trainer(OPTIONS), Trainer(OPTIONS)
    for _ in range(3):
        assert not torch.equal(step(alone, [ONE, TWO]).losses[0], step(other, [OTHER]).losses[0])
    reports = megagraph.reports()
    assert [report["replays"] for report in reports] == [2 * 2 * LAYERS, 2 * LAYERS]
    megagraph.uninstall()
    again = train(graph_config(), [[ONE, TWO]] * 3)
    for name, weight in alone.chunk.named_parameters():
        assert torch.equal(weight, again.weights[name])


# -- loops that are not one schedule call a step ---------------------------------------------------


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
