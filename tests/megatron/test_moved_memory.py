# SPDX-License-Identifier: Apache-2.0
"""Memory that a host moves around every phase without a word, and what goes on replaying meanwhile."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron_rig import LAYERS, ONE, OPTIONS, TWO, Micro, Pair, forward, grads, graph_config
from rl_rig import BANK, Offload, Round, fits, log_probs, rollouts, train
from same_bits import assert_same_bits

import megagraph
from megagraph.demo.trainer import Trainer


@dataclass(kw_only=True)
class Phases:
    """A host that loads a model before each phase and takes it away afterwards, and tells nobody.

    Gradients are loaded for training only. Some parameters are frozen.
    """

    mini_batches: int  # schedule calls of a phase
    reports: list[dict[str, Any]] = field(default_factory=list)  # after each phase

    def batches(self, index: int) -> list[list[Micro]]:
        """The packs of round `index`, all of which a capacity holds."""
        drawn = rollouts(index, mini_batches=self.mini_batches)
        return [[micro for micro in packs if fits(micro)] for packs in drawn]

    def run(self, mode: str, rounds: int) -> list[Round]:
        """Trains a fresh model in a mode of the plugin."""
        megagraph.install(graph_config(capacities=BANK, mode=mode))
        try:
            trainer, offload = Trainer(OPTIONS), Offload()
            for name, param in trainer.chunk.named_parameters():
                param.requires_grad_("layers.0.mlp" not in name)
            self._away(trainer, offload, with_gradients=True)
            return [self._round(trainer, offload, index) for index in range(rounds)]
        finally:
            megagraph.uninstall()

    def _round(self, trainer: Trainer, offload: Offload, index: int) -> Round:
        left, batches = Round(), self.batches(index)
        offload.weights_back(trainer.model, trainer.device)
        old = [log_probs(trainer.model, packs) for packs in batches]
        self._away(trainer, offload, with_gradients=False)
        offload.weights_back(trainer.model, trainer.device)
        offload.gradients_back(trainer.model)
        for packs, before in zip(batches, old, strict=True):
            left.old += before
            left.losses += train(trainer, packs, before, before)
            left.grads.append(grads(trainer.chunk))
            trainer.update()
        self._away(trainer, offload, with_gradients=True)
        return left

    def _away(self, trainer: Trainer, offload: Offload, *, with_gradients: bool) -> None:
        offload.weights(trainer.model)
        if with_gradients:
            offload.gradients(trainer.model)
        self.reports += megagraph.reports()


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_host_that_moves_memory_around_every_phase_replays_every_call(mini_batches: int) -> None:
    """Bug: each move cost a step, so that a phase of one schedule call never replayed.

    The first move still does. With one call a phase it meets training in the second round; with two, in
    the first.
    """
    rounds = 5
    graphed = Phases(mini_batches=mini_batches)
    assert_same_bits(graphed.run("graph", rounds), Phases(mini_batches=mini_batches).run("eager", rounds))
    report = graphed.reports[-1]
    calls = [sum(map(len, graphed.batches(index)[:1])) * LAYERS for index in range(rounds)]
    moved_in = 1 if mini_batches == 1 else 0
    warming_up = 2 * calls[0] if mini_batches == 1 else calls[0]
    assert report["eager"] == {"WARMING_UP": warming_up, "ADDRESS_MOVED": calls[moved_in]}
    assert report["failures"] == []
    first = next(index for index in range(rounds) if index > moved_in)
    before, after = graphed.reports[2 * first - 1], report
    assert after["calls"] - before["calls"] == after["replays"] - before["replays"] > 0


def _move_gradients(pair: Pair, held: list[Any]) -> None:
    for trainer in pair.both:
        held.append(Offload())  # and with it what takes the old place
        held[-1].move_gradients(trainer.model)


def test_gradients_that_move_leave_evaluation_its_graphs(pair: Pair) -> None:
    """Bug: every graph was dropped, and evaluation was captured again for nothing."""
    for _ in range(2):
        pair.step(ONE)
        pair.evaluate(TWO)
    held: list[Any] = []
    for index in range(3):
        before = pair.report()
        _move_gradients(pair, held)
        pair.evaluate(TWO, ONE)
        between = pair.report()
        assert between["eager"] == before["eager"]
        assert between["graphs"] == LAYERS and between["capture_seconds"] == before["capture_seconds"]
        pair.step(TWO, ONE)
        after = pair.report()
        assert after["eager"] == before["eager"], index
        assert after["graphs"] == (2 + 1) * LAYERS


def test_a_first_move_of_gradients_costs_the_training_step_that_it_meets(pair: Pair) -> None:
    for _ in range(2):
        pair.step(ONE)
        pair.evaluate(TWO)
    held: list[Any] = []
    for _ in range(3):
        _move_gradients(pair, held)
        pair.step(TWO, ONE)
        pair.evaluate(ONE)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "ADDRESS_MOVED": 2 * LAYERS}
    assert report["replays"] == ((1 + 2 * 2) + (1 + 3)) * LAYERS


def test_gradients_that_move_while_a_slot_is_held_take_every_graph_along(pair: Pair) -> None:
    """Only between leases can the graphs of one variant be taken out of a slot."""
    for _ in range(2):
        pair.step(ONE)
        pair.evaluate(TWO)
    held: list[Any] = []
    kept = _forward(pair.graphed)
    _move_gradients(pair, held)
    seconds = pair.report()["capture_seconds"]
    pair.evaluate(TWO)
    assert pair.report()["capture_seconds"] > seconds
    del kept
    for _ in range(2):
        pair.evaluate(TWO)
        pair.step(ONE)
    report = pair.report()
    assert report["graphs"] == (2 + 1) * LAYERS
    assert set(report["eager"]) == {"WARMING_UP"}


def test_gradients_that_move_hide_no_other_change(pair: Pair) -> None:
    for _ in range(2):
        pair.step(ONE)
        pair.evaluate(TWO)
    held: list[Any] = []
    _move_gradients(pair, held)
    for trainer in pair.both:
        attention = trainer.chunk.decoder.layers[1].self_attention
        attention.core_attention = copy.deepcopy(attention.core_attention)
    pair.evaluate(TWO)
    assert pair.report()["eager"] == {"WARMING_UP": 2 * LAYERS, "PARAMETERS_CHANGED": LAYERS}
    assert pair.report()["graphs"] == 0


def _forward(trainer: Trainer) -> torch.Tensor:
    """Of a block alone: a replayed tensor that somebody keeps."""
    trainer.zero_grad()
    kept: list[torch.Tensor] = []
    handle = trainer.chunk.decoder.register_forward_hook(lambda block, args, out: kept.append(out))
    losses = forward(trainer.model, Micro(lengths=(64,)), trainer.device)
    handle.remove()
    del losses
    return kept[0]
