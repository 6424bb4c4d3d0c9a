# SPDX-License-Identifier: Apache-2.0
"""Reinforcement-learning loops: log-probabilities, training, and weights that move between rounds.

The rollouts are drawn, not generated; everything else goes through Megatron's own schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from host_rig import BUDGET, Offload, frozen_model, log_probs, rollouts, run_phase, values_of
from megatron_rig import (
    LAYERS,
    ON_GPU,
    ONE,
    OPTIONS,
    Install,
    Micro,
    Pair,
    Step,
    forward,
    grads,
    graph_config,
)
from same_bits import assert_same_bits
from torch import Tensor

import megagraph
from megagraph.decide.dispatch import Capacity
from megagraph.demo.trainer import Trainer

ROUNDS = 50 if ON_GPU else 6
BANK = (
    Capacity(tokens=32, num_seqs=6, max_seqlen=32),
    Capacity(tokens=BUDGET, num_seqs=12, max_seqlen=BUDGET),
)


def _fitting(batches: list[list[Micro]]) -> int:
    """By hand: how many packs a capacity of `BANK` holds."""
    return sum(len(micro.lengths) <= 12 for packs in batches for micro in packs)


def _objective(model: Any, item: tuple[Micro, Tensor, Tensor]) -> Tensor:
    """A clipped policy gradient with a penalty towards the reference."""
    micro, before, other = item
    now = values_of(model, micro)
    advantage = torch.randn(now.numel(), generator=torch.Generator().manual_seed(micro.seed)).to(now.device)
    ratio, drift = (before - now).exp(), now - other
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return 0.1 * (drift.exp() - drift - 1) - gain


def train(
    trainer: Trainer, packs: Sequence[Micro], old: Sequence[Tensor], reference: Sequence[Tensor]
) -> Step:
    """The passes of one step, without its update."""
    trainer.zero_grad()
    losses = run_phase(trainer.model, list(zip(packs, old, reference, strict=True)), _objective)
    return Step(losses=losses, grads=grads(trainer.chunk))


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A whole run."""

    rounds: int  # how many
    mini_batches: int = 2  # schedule calls of each phase
    late_gradients: bool = False  # gradient buffers come back after the log-probability passes only
    megatrons_own: bool = False  # see `Offload`
    announces: bool = True  # whether the plugin is told so, by `suspend()` and `resume()`

    def batches(self, index: int) -> list[list[Micro]]:
        """The packs of round `index`."""
        return rollouts(index, mini_batches=self.mini_batches)

    def run(self, mode: str) -> tuple[list[Any], list[list[dict[str, Any]]]]:
        """What fresh models leave in a mode of the plugin, and their reports after each round."""
        megagraph.install(graph_config(capacities=BANK, mode=mode))
        trainer, (frozen, reference) = Trainer(OPTIONS), frozen_model(seed=99)
        policy, offload = trainer.model, Offload(megatrons_own=self.megatrons_own)
        left: list[Any] = []
        reports = []
        for index in range(self.rounds):
            is_away = index > 0
            if is_away:
                for model in (policy, reference):
                    offload.weights_back(model, trainer.device)
                if not self.late_gradients:
                    offload.gradients_back(policy)
                if self.announces:
                    megagraph.resume()
            batches = self.batches(index)
            old, others = ([log_probs(model, packs) for packs in batches] for model in (policy, reference))
            if is_away:
                if self.late_gradients:
                    offload.gradients_back(policy)
                offload.optimizer(trainer.optimizer, trainer.device)
            for packs, before, other in zip(batches, old, others, strict=True):
                left += [before, other, train(trainer, packs, before, other)]
                trainer.update()
            if self.announces:
                megagraph.suspend()
            for model in (policy, frozen):
                offload.weights(model)
            offload.gradients(policy)
            offload.optimizer(trainer.optimizer, "cpu")
            reports.append(megagraph.reports())
        megagraph.uninstall()
        return left, reports

    def counts(self, *, trains: bool) -> dict[str, int]:
        """By hand: the calls of a model by what becomes of them."""
        batches = [self.batches(index) for index in range(self.rounds)]
        passes = 2 if trains else 1
        moved = 0 if self.announces else _fitting(batches[1][:1])  # the first time only
        warming_up = passes * _fitting(batches[0][:1])
        calls = passes * sum(len(packs) for found in batches for packs in found)
        misfits = calls - passes * sum(map(_fitting, batches))
        counts = {
            "calls": calls,
            "replays": calls - misfits - moved - warming_up,
            "WARMING_UP": warming_up,
            "ADDRESS_MOVED": moved,
            "TOO_MANY_SEQUENCES": misfits,
        }
        return {name: count * LAYERS for name, count in counts.items() if count}


LOOPS = {
    # As verl calls the core: gradients come back only for the training pass.
    "weights that move every round": Loop(rounds=ROUNDS, late_gradients=True),
    "Megatron's own offload, late gradients": Loop(rounds=3, late_gradients=True, megatrons_own=True),
    # Memory that a host has announced to move costs no eager step: there would be no other step.
    "one schedule call a phase": Loop(rounds=4, mini_batches=1, late_gradients=True),
    # Which cost one step in all.
    "moves that nobody announces": Loop(rounds=3, announces=False),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # Megatron's
@pytest.mark.parametrize("name", LOOPS)
def test_weights_that_move_are_never_replayed_stale(name: str) -> None:
    """The loop with graphs has the bits of the eager loop, and every call is accounted for."""
    loop = LOOPS[name]
    graphed, reports = loop.run("graph")
    eager, eager_reports = loop.run("eager")
    assert eager_reports[-1][0]["replays"] == 0
    assert_same_bits(graphed, eager)
    for of_model, trains in zip(zip(*reports, strict=True), (True, False), strict=True):
        last = of_model[-1]
        found = {"calls": last["calls"], "replays": last["replays"], **last["eager"]}
        assert found == loop.counts(trains=trains)
        # Captured anew in each round.
        seconds = [report["capture_seconds"] for report in of_model]
        assert all(before < after for before, after in pairwise(seconds))
        # As many graphs in each round: nothing piles up, nothing is left out.
        per_layer = len(BANK) * (3 if trains else 1)
        begun = of_model[1:] if loop.mini_batches == 1 else of_model  # one call a phase warms up in a round
        assert {report["graphs"] for report in begun} == {per_layer * LAYERS}
        assert last["failures"] == []


PACKS = rollouts(0, mini_batches=1)[0]
CALLS = _fitting([PACKS]) * LAYERS


def _train_once(trainer: Trainer) -> Step:
    nothing = [torch.zeros(micro.physical, device=trainer.device) for micro in PACKS]
    return train(trainer, PACKS, nothing, nothing)


def _pass(trainer: Trainer) -> list[Tensor]:
    return log_probs(trainer.model, PACKS)


def test_gradients_that_are_away_cost_passes_without_gradients_nothing() -> None:
    """Bug: memory of freed gradients was read while a forward-only pass was captured, and crashed.

    Their absence also counted as a moved address, so that log-probability passes lost their graphs.
    """

    def address() -> list[int]:
        return [grad.data_ptr() for _name, grad in pair.graphed.named_main_grads()]

    pair = Pair(plugin={"capacities": BANK})
    offloads = {trainer: Offload() for trainer in pair.both}
    for work in (_train_once, _pass) * 2:
        assert_same_bits(*pair.each(work))
    before, addresses = pair.report(), address()
    pair.each(lambda trainer: offloads[trainer].gradients(trainer.model))
    for _ in range(2):
        assert_same_bits(*pair.each(_pass))
    after = pair.report()
    pair.each(lambda trainer: offloads[trainer].gradients_back(trainer.model))
    has_moved = address() != addresses
    for _ in range(2):
        assert_same_bits(*pair.each(_train_once))
    back = pair.report()
    assert after["replays"] - before["replays"] == 2 * CALLS
    assert after["eager"] == before["eager"] and after["graphs"] == before["graphs"]
    assert back["eager"].get("ADDRESS_MOVED", 0) == CALLS * has_moved
    assert back["replays"] - after["replays"] == 2 * CALLS - CALLS * has_moved


def test_a_training_forward_while_only_gradients_are_away_runs_eager(pair: Pair) -> None:
    """Its backward would add to where they were; they may come back elsewhere before it runs."""

    def work(trainer: Trainer) -> Step:
        offload = Offload()
        offload.gradients(trainer.model)
        losses, _ = forward(trainer.model, ONE, trainer.device)
        offload.gradients_back(trainer.model)
        losses.sum().backward()
        return Step(losses=[losses.detach().clone()], grads=grads(trainer.chunk))

    pair.step(ONE, times=2)
    assert_same_bits(*pair.each(work))
    assert pair.report()["eager"] == {"WARMING_UP": LAYERS, "ADDRESS_MOVED": LAYERS}
    pair.step(ONE, times=3)
    assert pair.report()["replays"] >= (1 + 2) * LAYERS


def test_a_first_capture_while_gradients_are_away_leaves_training_for_later(install: Install) -> None:
    install(capacities=BANK)
    trainer, offload = Trainer(OPTIONS), Offload()
    _train_once(trainer)
    offload.gradients(trainer.model)
    for _ in range(3):
        _pass(trainer)
    (report,) = megagraph.reports()
    assert (report["graphs"], report["replays"]) == (len(BANK) * LAYERS, 2 * CALLS)
    offload.gradients_back(trainer.model)
    _train_once(trainer)
    (report,) = megagraph.reports()
    assert (report["graphs"], report["replays"]) == (len(BANK) * 3 * LAYERS, 3 * CALLS)
    assert set(report["eager"]) == {"WARMING_UP"}


def test_a_frozen_model_that_gets_other_weights_replays_with_those(install: Install) -> None:
    """As a host updates its reference: in place, then by replacing every parameter."""
    install(capacities=BANK)
    frozen, called = frozen_model(seed=3)
    others = [frozen_model(seed=seed)[0].state_dict() for seed in (4, 5)]
    for _ in range(2):
        log_probs(called, PACKS)
    found = []
    for weights, assign in zip(others, (False, True), strict=True):
        frozen.load_state_dict(weights, assign=assign)
        for _ in range(2):
            graphed = log_probs(called, PACKS)
            with megagraph.disable_cuda_graphs_this_step():
                assert_same_bits(graphed, log_probs(called, PACKS))
        found.append(graphed)
    assert not any(map(torch.equal, *found))
    (report,) = megagraph.reports()
    assert report["eager"] == {"WARMING_UP": CALLS, "ADDRESS_MOVED": CALLS, "DISABLED": 4 * CALLS}
    assert report["replays"] == (1 + 2 + 1) * CALLS
