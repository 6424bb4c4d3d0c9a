# SPDX-License-Identifier: Apache-2.0
"""Memory that a host moves, with a word or without; parameters that are not the plain case."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import megatron_rig as rig
import pytest
import torch
from host_rig import Offload
from same_bits import assert_same_bits
from torch import Tensor, nn

import megagraph
from megagraph.demo.trainer import Trainer


@pytest.fixture
def captured(pair: rig.Pair) -> rig.Pair:
    """Two models of which one has graphs for training and for evaluation."""
    for _ in range(2):
        pair.step(rig.ONE)
        pair.evaluate(rig.TWO)
    return pair


def _move_gradients(pair: rig.Pair) -> list[Offload]:
    """Of both; what is returned holds what takes the old place."""
    offloads = [Offload(), Offload()]
    for trainer, offload in zip(pair.both, offloads, strict=True):
        offload.move_gradients(trainer.model)
    return offloads


def test_gradients_that_move_leave_evaluation_its_graphs(captured: rig.Pair) -> None:
    """Bug: every graph was dropped, and evaluation was captured again for nothing."""
    held = []
    for index in range(2):
        before = captured.report()
        held += _move_gradients(captured)
        captured.evaluate(rig.TWO, rig.ONE)
        between = captured.report()
        assert between["eager"] == before["eager"]
        assert between["graphs"] == rig.LAYERS and between["capture_seconds"] == before["capture_seconds"]
        captured.step(rig.TWO, rig.ONE)
        after = captured.report()
        assert after["eager"] == before["eager"], index
        assert after["graphs"] == (2 + 1) * rig.LAYERS


def test_gradients_that_move_while_a_slot_is_held_take_every_graph_along(captured: rig.Pair) -> None:
    """Only between leases can the graphs of one variant be taken out of a slot."""
    trainer, kept = captured.graphed, []
    trainer.zero_grad()
    with trainer.chunk.decoder.register_forward_hook(lambda block, args, out: kept.append(out)):
        rig.forward(trainer.model, rig.Micro(lengths=(64,)), trainer.device)
    held = _move_gradients(captured)
    seconds = captured.report()["capture_seconds"]
    captured.evaluate(rig.TWO)
    assert held and captured.report()["capture_seconds"] > seconds
    kept.clear()
    for _ in range(2):
        captured.evaluate(rig.TWO)
        captured.step(rig.ONE)
    report = captured.report()
    assert report["graphs"] == (2 + 1) * rig.LAYERS
    assert set(report["eager"]) == {"WARMING_UP"}


@pytest.mark.parametrize("is_suspended", [False, True])
def test_resume_announces_no_later_move_nor_without_a_suspension(pair: rig.Pair, is_suspended: bool) -> None:
    pair.step(rig.ONE, times=2)
    if is_suspended:
        megagraph.suspend()
    megagraph.resume()
    if is_suspended:
        pair.step(rig.ONE)
    for trainer in pair.both:
        weight = trainer.chunk.decoder.layers[1].mlp.linear_fc1.weight
        weight.data = weight.data.clone()
    pair.step(rig.ONE)
    assert pair.report()["eager"] == dict.fromkeys(("WARMING_UP", "ADDRESS_MOVED"), rig.LAYERS)


@pytest.mark.parametrize("how", ["a suspension", "a skip"])
def test_what_moved_before_graphs_may_run_again_inside_a_step_is_not_read(pair: rig.Pair, how: str) -> None:
    """Bug: the rest of the step replayed on the memory of before, at which no boundary had looked."""
    pair.step(rig.ONE, rig.TWO, times=3)
    trainer, offload, skip = pair.graphed, Offload(), megagraph.disable_cuda_graphs_this_step()

    def move() -> None:
        offload.weights(trainer.model)
        offload.weights_back(trainer.model, trainer.device)

    def inside(*_: object) -> None:
        handle.remove()
        if how == "a skip":
            skip.__exit__(None, None, None)
        else:
            megagraph.suspend()
            move()
            megagraph.resume()

    handle, before = trainer.model.register_forward_pre_hook(inside), pair.report()
    expected = rig.step(pair.eager, [rig.ONE, rig.TWO], eager=True)
    if how == "a skip":
        move()
        skip.__enter__()
    assert_same_bits(expected, rig.step(trainer, [rig.ONE, rig.TWO]))
    reason = "DISABLED" if how == "a skip" else "SUSPENDED"
    assert rig.eager_since(pair.report(), before) == {reason: 2 * rig.LAYERS}
    pair.step(rig.ONE, rig.TWO, times=2)
    assert pair.costs(rig.ONE, rig.TWO) == {}


def test_a_frozen_layer_that_was_away_replays_until_it_trains_again(pair: rig.Pair) -> None:
    """Bug: parameters that were on another device lose DDP's hooks, and it stayed eager before it trained."""

    def of_layer(work: Callable[[Any], object]) -> None:
        pair.each(lambda trainer: work(trainer.chunk.decoder.layers[1]))

    pair.step(rig.ONE)
    of_layer(lambda layer: layer.requires_grad_(False))
    pair.step(rig.ONE, times=3)
    megagraph.suspend()
    for trainer, offload in zip(pair.both, (Offload(), Offload()), strict=True):
        offload.weights(trainer.chunk)
        offload.weights_back(trainer.chunk, trainer.device)
    megagraph.resume()
    before = pair.report()
    pair.step(rig.ONE, rig.TWO, times=2)
    report = pair.report()
    assert report["eager"] == before["eager"] and report["failures"] == []
    of_layer(lambda layer: layer.requires_grad_(True))
    pair.step(rig.ONE, rig.TWO, times=3)
    report = pair.report()
    assert report["eager"].keys() == before["eager"].keys() | {"FOREIGN_HOOK"}
    assert len(report["failures"]) == 1 and "has lost its hook" in report["failures"][0]
    assert report["replays"] == before["replays"] + 4 * rig.LAYERS + 4


def _load(trainer: Any) -> None:
    """Other weights in the same memory, as from a checkpoint."""
    others = {name: weight.flip(0) for name, weight in rig.weights(trainer.chunk).items()}
    trainer.chunk.load_state_dict(others, strict=False)
    trainer.optimizer.reload_model_params()


def _replace(param: nn.Parameter) -> Tensor:
    """Other values in other memory; what reads the old one, which is returned, from now on reads NaN."""
    old, param.data = param.data, param.data.flip(0).contiguous()
    return old.fill_(float("nan"))


def _replace_weight(trainer: Any, name: str) -> Tensor:
    old = _replace(trainer.chunk.get_parameter(name))
    trainer.optimizer.reload_model_params()
    return old


def _change_table(trainer: Any, *, in_place: bool) -> None:
    table = trainer.chunk.table
    table[0] = table[0].mul_(1.5) if in_place else table[0] * 1.5


def _move_main_grads(trainer: Any) -> list[Tensor]:
    """Moves every main gradient out of the DDP's buffer."""
    old = [param.main_grad.detach() for param in trainer.chunk.parameters()]
    for param, grad in zip(trainer.chunk.parameters(), old, strict=True):
        param.main_grad = torch.zeros_like(grad)
        grad.fill_(float("nan"))
    return old


# What is done between two steps, and how many calls of each layer run eager in the second one.
MOVES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "other weights in place": (_load, 0),
    "a weight of a layer": (partial(_replace_weight, name="decoder.layers.1.mlp.linear_fc1.weight"), 2),
    "a weight outside of the layers": (partial(_replace_weight, name="decoder.final_layernorm.weight"), 0),
    # Bug: a graph read it by its address, which nobody watched or kept alive.
    "a table that no module has": (partial(_change_table, in_place=False), 2),
    "that table in place": (partial(_change_table, in_place=True), 0),
    "main gradients": (_move_main_grads, 2),
    # Nothing runs eager if the host has said that it moves memory.
    "main gradients, suspended": (_move_main_grads, 0),
}


@pytest.mark.parametrize("what", MOVES)
def test_memory_that_moves_between_steps_costs_those_who_read_it_one_eager_step(what: str) -> None:
    pair, (move, costs) = rig.Pair(), MOVES[what]
    for chunk in (trainer.chunk for trainer in pair.both):  # whose second MLP reads it
        chunk.table = [torch.linspace(0.5, 1.5, rig.OPTIONS.hidden, device=pair.graphed.device)]
        scale = partial(lambda out, chunk: out * chunk.table[0].to(out), chunk=chunk)
        rig.changes_output(chunk.decoder.layers[1].mlp, scale)
    pair.step(rig.ONE, rig.TWO, times=3)  # from the second replayed step on, a hash alone is compared
    graphs, is_suspended = pair.report()["graphs"], "suspended" in what
    if is_suspended:
        megagraph.suspend()
    held = [move(trainer) for trainer in pair.both]
    if is_suspended:
        megagraph.resume()
    for _ in range(3):
        for trainer in pair.both:
            for param in trainer.chunk.parameters():
                param.main_grad.zero_()
        pair.step(rig.TWO, rig.OTHER)
    moved = {"ADDRESS_MOVED": costs * rig.LAYERS} if costs else {}
    pair.ran((4 + 6 - costs) * rig.LAYERS, graphs=graphs, WARMING_UP=2 * rig.LAYERS, **moved)
    assert len(held) == 2


def test_a_call_outside_of_any_schedule_never_replays_moved_memory(trainer: Trainer) -> None:
    """Bug: addresses are looked at before a schedule only, so a bare call replayed on the old ones."""

    def call() -> None:
        with torch.no_grad():
            rig.forward(trainer.model.eval(), rig.ONE, trainer.device)

    call()
    for _ in range(2):
        rig.evaluate(trainer, [rig.ONE])
    replays = rig.report_of(trainer)["replays"]
    held = [_replace(param) for param in trainer.chunk.parameters()]
    call()
    report = rig.report_of(trainer)
    assert held and report["replays"] == replays and report["eager"]["ADDRESS_MOVED"] == rig.LAYERS


def test_a_parameter_that_gets_no_gradient_any_more_holds_no_bucket_up() -> None:
    """Megatron reduces it when as many are ready as in the first step, and graphs deliver none of this."""
    uses, steps = [True], [[rig.ONE, rig.TWO], [rig.OTHER, rig.ONE], [rig.TWO, rig.TWO]]

    def scaled(model: Any) -> None:
        mlp = model.decoder.layers[0].mlp
        mlp.scale = scale = nn.Parameter(torch.full((), 1.5))
        rig.changes_output(mlp, lambda out: out * scale if uses[0] else out)

    def once(_trainer: Trainer, index: int) -> nullcontext[None]:
        uses[0] = index == 0  # in the warm-up, by which Megatron counts, and never again
        return nullcontext()

    overlap = {"overlap_grad_reduce": True}  # as eager cannot: its own hooks would not report the parameter
    graphed, eager = (
        rig.train(rig.graph_config(), steps, prepare=scaled, around=once, eager=not ddp, ddp=ddp)
        for ddp in (overlap, {})
    )
    assert_same_bits(graphed, eager)
    assert graphed.steps[0].grads["decoder.layers.0.mlp.scale"].any()
    assert not graphed.steps[-1].grads["decoder.layers.0.mlp.scale"].any()
    assert graphed.report["replays"] == 2 * 2 * rig.LAYERS and graphed.report["failures"] == []


def test_gradients_that_are_away_cost_passes_without_gradients_nothing(captured: rig.Pair) -> None:
    """Bugs: a forward-only capture read freed gradients, and crashed; their absence was a moved address."""

    def address() -> list[int]:
        return [grad.data_ptr() for _name, grad in captured.graphed.named_main_grads()]

    offloads = [(Offload(), trainer.model) for trainer in captured.both]
    before, addresses, calls = captured.report(), address(), 2 * rig.LAYERS
    for offload, model in offloads:
        offload.gradients(model)
    for _ in range(2):
        captured.evaluate(rig.TWO, rig.ONE)
    after = captured.report()
    for offload, model in offloads:
        offload.gradients_back(model)
    has_moved = address() != addresses
    captured.step(rig.ONE, rig.TWO, times=2, update=False)
    back = captured.report()
    assert after["replays"] - before["replays"] == 2 * calls
    assert after["eager"] == before["eager"] and after["graphs"] == before["graphs"]
    assert back["eager"].get("ADDRESS_MOVED", 0) == calls * has_moved
    assert back["replays"] - after["replays"] == 2 * calls - calls * has_moved


@pytest.mark.parametrize("before", [1, 2])
def test_a_training_forward_while_only_gradients_are_away_runs_eager(pair: rig.Pair, before: int) -> None:
    """They may come back elsewhere before its backward. Behind one step graphs are due, and have to wait."""

    def work(trainer: Trainer) -> rig.Step:
        offload = Offload()
        offload.gradients(trainer.model)
        losses, _ = rig.forward(trainer.model, rig.ONE, trainer.device)
        offload.gradients_back(trainer.model)
        losses.sum().backward()
        return rig.Step(losses=[losses.detach().clone()], grads=rig.grads(trainer.chunk))

    pair.step(rig.ONE, times=before)
    assert_same_bits(*pair.each(work))
    report = pair.report()
    second = "WARMING_UP" if before == 1 else "ADDRESS_MOVED"
    assert sum(report["eager"].values()) == 2 * rig.LAYERS and {*report["eager"]} == {"WARMING_UP", second}
    assert bool(report["graphs"]) == (before == 2) and report["failures"] == []
    pair.step(rig.ONE, times=3)
    assert pair.report()["replays"] >= (before - 1 + 2) * rig.LAYERS
