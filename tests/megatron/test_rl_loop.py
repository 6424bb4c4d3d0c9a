# SPDX-License-Identifier: Apache-2.0
"""Reinforcement-learning loops: log-probabilities, training, and weights that move between rounds."""

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron_rig import LAYERS, ON_GPU, OPTIONS, Micro, Pair, Step, forward, grads, graph_config
from rl_rig import BANK, Loop, Offload, Round, fits, frozen_model, log_probs, rollouts, train
from same_bits import assert_same_bits

import megagraph
from megagraph.demo.trainer import Trainer

ROUNDS = 50 if ON_GPU else 6


def _fitting(batches: list[list[Micro]]) -> int:
    return sum(fits(micro) for packs in batches for micro in packs)


def _expected(loop: Loop, *, trains: bool) -> dict[str, int]:
    """By hand: the calls of a model by what becomes of them, over a whole loop."""
    batches = [loop.batches(index) for index in range(loop.rounds)]
    passes = 2 if trains else 1
    costs = loop.moves and not loop.announces
    moved = _fitting(batches[1][:1]) if costs else 0  # the first time only
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


def _compare(loop: Loop) -> None:
    """The loop with graphs has the bits of the eager loop, and every call is accounted for."""
    graphed, policy, reference = loop.run("graph")
    eager, eager_policy, _ = loop.run("eager")
    assert eager_policy[-1]["replays"] == 0
    assert_same_bits(graphed, eager)
    for reports, trains in ((policy, True), (reference, False)):
        last = reports[-1]
        found = {"calls": last["calls"], "replays": last["replays"], **last["eager"]}
        assert found == _expected(loop, trains=trains)
        if loop.moves:  # captured anew in each round
            seconds = [report["capture_seconds"] for report in reports]
            assert all(before < after for before, after in pairwise(seconds))
        # As many graphs in each round: nothing piles up, nothing is left out.
        per_layer = len(BANK) * (3 if trains else 1)
        begun = reports[1:] if loop.mini_batches == 1 else reports  # one call a phase warms up in a round
        assert {report["graphs"] for report in begun} == {per_layer * LAYERS}
        assert last["failures"] == []


LOOPS = {
    # As verl calls the core: gradients come back only for the training pass.
    "weights that move every round": Loop(rounds=ROUNDS, late_gradients=True),
    "Megatron's own offload, late gradients": Loop(rounds=3, late_gradients=True, megatrons_own=True),
    "everything back before the first pass": Loop(rounds=3, mini_batches=3),
    # Memory that a host has announced to move costs no eager step: there would be no other step.
    "one schedule call a phase": Loop(rounds=4, mini_batches=1, late_gradients=True),
    # Which cost one step in all.
    "moves that nobody announces": Loop(rounds=4, announces=False),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # Megatron's
@pytest.mark.parametrize("name", LOOPS)
def test_weights_that_move_are_never_replayed_stale(name: str) -> None:
    _compare(LOOPS[name])


def test_rounds_without_offload_capture_once() -> None:
    loop = Loop(rounds=3, moves=False)
    _compare(loop)
    _, policy, reference = loop.run("graph")
    for reports in (policy, reference):
        assert len({report["capture_seconds"] for report in reports}) == 1


def test_gradients_that_are_away_cost_passes_without_gradients_nothing() -> None:
    """Bug: memory of freed gradients was read while a forward-only pass was captured, and crashed.

    Their absence also counted as a moved address, so that log-probability passes lost their graphs.
    """
    packs = rollouts(0, mini_batches=1)[0]
    calls = _fitting([packs]) * LAYERS

    def run(mode: str) -> tuple[Round, list[dict[str, Any]], bool]:
        """What all passes left, the reports, and whether the gradients came back to another address."""
        megagraph.install(graph_config(capacities=BANK, mode=mode))
        trainer, offload = Trainer(OPTIONS), Offload()
        left, reports = Round(), []
        other = [torch.zeros(micro.physical, device=trainer.device) for micro in packs]

        def train_once() -> None:
            left.losses.extend(train(trainer, packs, other, other))
            left.grads.append(grads(trainer.chunk))

        for _ in range(2):
            train_once()
            left.old += log_probs(trainer.model, packs)
        reports += megagraph.reports()
        before = _addresses(trainer)
        offload.gradients(trainer.model)
        for _ in range(2):
            left.old += log_probs(trainer.model, packs)
        reports += megagraph.reports()
        offload.gradients_back(trainer.model)
        has_moved = _addresses(trainer) != before
        for _ in range(2):
            train_once()
        reports += megagraph.reports()
        megagraph.uninstall()
        return left, reports, has_moved

    graphed, (before, after, back), has_moved = run("graph")
    assert_same_bits([graphed], [run("eager")[0]])
    assert after["replays"] - before["replays"] == 2 * calls
    assert after["eager"] == before["eager"] and after["graphs"] == before["graphs"]
    assert back["eager"].get("ADDRESS_MOVED", 0) == calls * has_moved
    assert back["replays"] - after["replays"] == 2 * calls - calls * has_moved


def _addresses(trainer: Trainer) -> list[int]:
    return [grad.data_ptr() for _name, grad in trainer.named_main_grads()]


def test_a_training_forward_while_only_gradients_are_away_runs_eager() -> None:
    """Its backward would add to where they were; they may come back elsewhere before it runs."""
    megagraph.install(graph_config())
    micro = Micro(lengths=(9, 20))
    pair = Pair()
    pair.step(micro, times=2)
    found = []
    for trainer in pair.both:
        offload = Offload()
        with megagraph.disable_cuda_graphs_this_step() if trainer is pair.eager else nullcontext():
            offload.gradients(trainer.model)
            losses, _ = forward(trainer.model, micro, trainer.device)
            offload.gradients_back(trainer.model)
            losses.sum().backward()
        found.append(Step(losses=[losses.detach()], grads=grads(trainer.chunk)))
        del losses
    assert_same_bits(*found)
    assert pair.report()["eager"] == {"WARMING_UP": LAYERS, "ADDRESS_MOVED": LAYERS}
    pair.step(micro, times=3)
    assert pair.report()["replays"] >= (1 + 2) * LAYERS


def test_a_first_capture_while_gradients_are_away_leaves_training_for_later() -> None:
    megagraph.install(graph_config(capacities=BANK))
    trainer, offload = Trainer(OPTIONS), Offload()
    packs = rollouts(0, mini_batches=1)[0]
    other = [torch.zeros(micro.physical, device=trainer.device) for micro in packs]
    train(trainer, packs, other, other)
    offload.gradients(trainer.model)
    for _ in range(3):
        log_probs(trainer.model, packs)
    (report,) = megagraph.reports()
    assert report["graphs"] == len(BANK) * LAYERS
    assert report["replays"] == 2 * _fitting([packs]) * LAYERS
    offload.gradients_back(trainer.model)
    train(trainer, packs, other, other)
    (report,) = megagraph.reports()
    assert report["graphs"] == len(BANK) * 3 * LAYERS
    assert report["replays"] == 3 * _fitting([packs]) * LAYERS
    assert set(report["eager"]) == {"WARMING_UP"}


def test_a_frozen_model_that_gets_other_weights_replays_with_those() -> None:
    """As a host updates its reference: in place, then by replacing every parameter."""
    megagraph.install(graph_config(capacities=BANK))
    frozen, called = frozen_model(seed=3)
    others = [frozen_model(seed=seed)[0].state_dict() for seed in (4, 5)]
    packs = [micro for micro in rollouts(1, mini_batches=1)[0] if fits(micro)]
    for _ in range(2):
        log_probs(called, packs)
    found = []
    for weights, assign in zip(others, (False, True), strict=True):
        frozen.load_state_dict(weights, assign=assign)
        for _ in range(2):
            graphed = log_probs(called, packs)
            with megagraph.disable_cuda_graphs_this_step():
                eager = log_probs(called, packs)
            assert all(map(torch.equal, graphed, eager))
        found.append(graphed)
    assert not any(map(torch.equal, *found))
    (report,) = megagraph.reports()
    calls = len(packs) * LAYERS
    assert report["eager"] == {"WARMING_UP": calls, "ADDRESS_MOVED": calls, "DISABLED": 4 * calls}
    assert report["replays"] == (1 + 2 + 1) * calls
