# SPDX-License-Identifier: Apache-2.0
"""Memory that a host moves, with a word or without; parameters that are not the plain case."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import megatron_rig as rig
import pytest
import torch
from host_rig import Offload, adapt
from same_bits import assert_same_bits
from torch import Tensor, nn

import megagraph
from megagraph.demo.trainer import Trainer, gpt_model


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
    handle = trainer.chunk.decoder.register_forward_hook(lambda block, args, out: kept.append(out))
    rig.forward(trainer.model, rig.Micro(lengths=(64,)), trainer.device)
    handle.remove()
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


def test_gradients_that_move_hide_no_other_change(captured: rig.Pair) -> None:
    held = _move_gradients(captured)
    for trainer in captured.both:
        attention = trainer.chunk.decoder.layers[1].self_attention
        attention.core_attention = copy.deepcopy(attention.core_attention)
    captured.evaluate(rig.TWO)
    report = captured.report()
    assert held and report["eager"] == {"WARMING_UP": 2 * rig.LAYERS, "PARAMETERS_CHANGED": rig.LAYERS}
    assert report["graphs"] == 0


# -- adapters, tied embeddings, weights loaded in the middle ---------------------------------------


STEPS = [[rig.ONE, rig.TWO], [rig.OTHER, rig.ONE], [rig.TWO, rig.TWO]]
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@pytest.mark.parametrize("first", [0, 1], ids=["of all layers", "of one layer"])
def test_adapters_in_a_frozen_model_are_graphed_with_eager_bits(first: int) -> None:
    graphed = rig.compare_runs(STEPS, prepare=partial(adapt, names=LINEARS, first=first))
    assert graphed.report["replays"] == 2 * 2 * rig.LAYERS and graphed.report["failures"] == []
    assert graphed.report["eager"] == {"WARMING_UP": 2 * rig.LAYERS}
    trained = graphed.steps[0].grads.keys()
    assert len(trained) == 2 * len(LINEARS) * (rig.LAYERS - first)
    assert all(name.endswith((".down", ".up")) for name in trained)
    assert all(grad.any() for grad in graphed.steps[-1].grads.values())


def test_adapters_that_come_later_cost_one_eager_step(pair: rig.Pair) -> None:
    """DDP does not know them: their gradients stay in `.grad`."""
    pair.step(rig.ONE, times=2)
    for trainer in pair.both:
        adapt(trainer.chunk, LINEARS)
    pair.step(rig.TWO, rig.OTHER, times=3)
    adapter = pair.graphed.chunk.decoder.layers[0].mlp.linear_fc1
    assert not hasattr(adapter.up, "main_grad") and adapter.up.grad.any()
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": rig.LAYERS, "ADDRESS_MOVED": 2 * rig.LAYERS}
    assert report["replays"] == (1 + 4) * rig.LAYERS and report["failures"] == []


class TiedTrainer(Trainer):
    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        return gpt_model(self.options, config, spec, share_embeddings_and_output_weights=True)


def test_tied_embeddings_have_eager_bits() -> None:
    graphed = rig.compare_runs(STEPS, TiedTrainer, options=rig.OPTIONS)
    assert "output_layer.weight" not in graphed.weights
    assert graphed.report["replays"] == 2 * 2 * rig.LAYERS and graphed.report["failures"] == []


def _load(trainer: Any, state: dict[str, Tensor]) -> None:
    trainer.chunk.load_state_dict(state, strict=False)
    trainer.optimizer.reload_model_params()


def test_a_checkpoint_loaded_in_place_is_what_graphs_read_from_then_on(pair: rig.Pair) -> None:
    saved = rig.weights(pair.graphed.chunk)
    pair.step(rig.ONE, rig.TWO, times=3)
    graphs = pair.report()["graphs"]
    for trainer in pair.both:
        _load(trainer, saved)
    assert all(torch.equal(weight, saved[name]) for name, weight in rig.weights(pair.graphed.chunk).items())
    pair.step(rig.TWO, rig.OTHER, times=2)
    pair.evaluate(rig.ONE)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": (2 + 1) * rig.LAYERS}
    assert report["replays"] == (4 + 4) * rig.LAYERS and report["graphs"] == graphs


def _replace(param: nn.Parameter, held: list[Tensor]) -> None:
    """Other values in other memory; what reads the old one from now on reads NaN."""
    held.append(param.data)
    param.data = param.data.flip(0).contiguous()
    held[-1].fill_(float("nan"))


@pytest.mark.parametrize(
    ("name", "costs"),
    [("decoder.layers.1.mlp.linear_fc1.weight", 2), ("decoder.final_layernorm.weight", 0)],
    ids=["of a layer", "outside of the layers"],
)
def test_one_weight_in_other_memory_costs_the_layers_one_eager_step(
    name: str, costs: int, pair: rig.Pair
) -> None:
    pair.step(rig.ONE, rig.TWO, times=2)
    held: list[Tensor] = []
    for trainer in pair.both:
        _replace(trainer.chunk.get_parameter(name), held)
        trainer.optimizer.reload_model_params()
    pair.step(rig.TWO, rig.OTHER, times=3)
    report, moved = pair.report(), costs * rig.LAYERS
    assert report["eager"] == {"WARMING_UP": 2 * rig.LAYERS, **({"ADDRESS_MOVED": moved} if moved else {})}
    assert report["replays"] == (2 + 6) * rig.LAYERS - moved and len(held) == 2


@pytest.mark.parametrize("in_place", [False, True])
def test_a_table_that_no_module_has_is_captured_anew_where_another_takes_its_place(in_place: bool) -> None:
    """Bug: a graph read it by its address, which nobody watched or kept alive."""
    pair, tables = rig.Pair(), []
    for trainer in pair.both:
        mlp = trainer.chunk.decoder.layers[1].mlp
        tables.append([torch.linspace(0.5, 1.5, rig.OPTIONS.hidden).to(mlp.linear_fc1.weight)])
        rig.changes_output(mlp, lambda out, held=tables[-1]: out * held[0])
    pair.step(rig.ONE, rig.TWO, times=3)
    for held in tables:
        if in_place:
            held[0].mul_(1.5)
        else:
            held[0] = held[0] * 1.5
    pair.step(rig.TWO, rig.OTHER, times=3)
    report, moved = pair.report(), 0 if in_place else 2 * rig.LAYERS
    assert report["eager"] == {"WARMING_UP": 2 * rig.LAYERS, **({"ADDRESS_MOVED": moved} if moved else {})}
    assert report["replays"] == (4 + 6) * rig.LAYERS - moved and report["failures"] == []


def _move_main_grads(trainer: Any, *, in_place: bool) -> list[Tensor]:
    """Moves every main gradient out of the DDP's buffer; all objects may stay the same ones."""
    old = [param.main_grad.detach() for param in trainer.chunk.parameters()]
    for param, grad in zip(trainer.chunk.parameters(), old, strict=True):
        if in_place:
            param.main_grad.data = torch.zeros_like(grad)
        else:
            param.main_grad = torch.zeros_like(grad)
        grad.fill_(float("nan"))
    return old


@pytest.mark.parametrize(
    ("in_place", "is_suspended"), [(False, False), (False, True), (True, False)], ids=str
)
def test_main_gradients_of_a_hosts_own_are_captured_anew(
    in_place: bool, is_suspended: bool, pair: rig.Pair
) -> None:
    """One step runs eager, unless the host has said that it moves memory."""
    pair.step(rig.ONE, rig.TWO, times=3)  # from the second replayed step on, a hash alone is compared
    if is_suspended:
        megagraph.suspend()
    held = [_move_main_grads(trainer, in_place=in_place) for trainer in pair.both]
    if is_suspended:
        megagraph.resume()
    for _ in range(3):
        for trainer in pair.both:
            for param in trainer.chunk.parameters():
                param.main_grad.zero_()
        pair.step(rig.TWO, rig.OTHER)
    report = pair.report()
    moved = {} if is_suspended else {"ADDRESS_MOVED": 2 * rig.LAYERS}
    assert held and report["eager"] == {"WARMING_UP": 2 * rig.LAYERS, **moved}
    assert report["replays"] == (4 + 6) * rig.LAYERS - sum(moved.values())


def test_a_call_outside_of_any_schedule_never_replays_moved_memory(trainer: Trainer) -> None:
    """Bug: addresses are looked at before a schedule only, so a bare call replayed on the old ones."""

    def call() -> None:
        with torch.no_grad():
            rig.forward(trainer.model.eval(), rig.ONE, trainer.device)

    call()
    for _ in range(2):
        rig.evaluate(trainer, [rig.ONE])
    replays = rig.report_of(trainer)["replays"]
    held: list[Tensor] = []
    for param in trainer.chunk.parameters():
        _replace(param, held)
    call()
    report = rig.report_of(trainer)
    assert held and report["replays"] == replays and report["eager"]["ADDRESS_MOVED"] == rig.LAYERS


def test_a_parameter_that_gets_no_gradient_any_more_holds_no_bucket_up() -> None:
    """Megatron reduces a bucket when as many parameters are ready as in the first step.

    A graph delivers no gradient of such a parameter; without a word of it the reduction never begins.
    """
    uses = [True]

    def scaled(model: Any) -> None:
        mlp = model.decoder.layers[0].mlp
        mlp.scale = scale = nn.Parameter(torch.full((), 1.5))
        rig.changes_output(mlp, lambda out: out * scale if uses[0] else out)

    @contextmanager
    def once(_trainer: Trainer, index: int) -> Iterator[None]:
        uses[0] = index == 0  # in the warm-up, by which Megatron counts, and never again
        yield

    overlap = {"overlap_grad_reduce": True}  # as eager cannot: its own hooks would not report the parameter
    graphed, eager = (
        rig.train(rig.graph_config(), STEPS, prepare=scaled, around=once, eager=not ddp, ddp=ddp)
        for ddp in (overlap, {})
    )
    assert_same_bits(graphed, eager)
    assert graphed.steps[0].grads["decoder.layers.0.mlp.scale"].any()
    assert not graphed.steps[-1].grads["decoder.layers.0.mlp.scale"].any()
    assert graphed.report["replays"] == 2 * 2 * rig.LAYERS and graphed.report["failures"] == []
