# SPDX-License-Identifier: Apache-2.0
"""What happens between steps: evaluation, moved and frozen parameters, settings, suspension, errors."""

import re
from collections.abc import Callable
from functools import partial

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
    compare_runs,
    evaluate,
    forward,
    graph_config,
    report_of,
    step,
    train,
)

import megagraph
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


def test_evaluation_alone_is_graphed(pair: Pair) -> None:
    for micro in (ONE, TWO, OTHER):
        pair.evaluate(micro)
    assert pair.report()["replays"] == 2 * LAYERS
    assert pair.report()["graphs"] == LAYERS


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


@pytest.mark.parametrize("query_groups", [1, 2])
def test_grouped_queries_have_eager_bits(query_groups: int) -> None:
    steps = [[ONE, TWO], [OTHER, ONE], [TWO, TWO]]
    run = compare_runs(steps, query_groups=query_groups, heads=4)
    assert run.report["replays"] == 2 * 2 * LAYERS


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
