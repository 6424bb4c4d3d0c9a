# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning with an adapter: the reference is the policy with its adapter switched off."""

import contextlib
from collections.abc import Iterator

import torch
from megatron_rig import LAYERS, Install, Micro, Pair, around_mlps
from rl_rig import rollouts
from state_changes import Probe, Undo
from torch import Tensor

from megagraph.demo.trainer import Trainer

ROUNDS = 50 if torch.cuda.is_available() else 15
MINI_BATCHES = 2


@contextlib.contextmanager
def _without_adapters(pair: Pair) -> Iterator[None]:
    """As Megatron-Bridge's and PEFT's `disable_adapter()` do it: a flag of each wrapper."""
    wrappers = [layer.mlp.inner for trainer in pair.both for layer in trainer.chunk.decoder.layers]
    for wrapper in wrappers:
        wrapper._adapter_enabled = False
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper._adapter_enabled = True


def _merge(trainer: Trainer) -> Undo:
    """The adapter's first path into the weight that it goes around, for rollouts elsewhere."""
    saved: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for layer in trainer.chunk.decoder.layers:
            wrapper = layer.mlp.inner
            weight = wrapper.inner.linear_fc2.weight
            saved.append((weight, weight.clone()))
            weight[:, : weight.shape[0]] += wrapper.paths["first_up"] @ wrapper.paths["first_down"]
            wrapper.is_merged = True

    def undo() -> None:
        with torch.no_grad():
            for weight, before in saved:
                weight.copy_(before)
        for layer in trainer.chunk.decoder.layers:
            layer.mlp.inner.is_merged = False

    return undo


def _round(pair: Pair, packs: list[list[Micro]]) -> None:
    everything = [micro for mini_batch in packs for micro in mini_batch]
    pair.evaluate(*everything)
    with _without_adapters(pair):
        pair.evaluate(*everything)
    for mini_batch in packs:
        pair.step(*mini_batch)
    undos = [_merge(trainer) for trainer in pair.both]
    for undo in undos:
        undo()


def test_every_pass_has_eager_bits_and_replays_from_the_second_round_on(install: Install) -> None:
    install(capacities=("64:12",))
    pair = Pair(prepare=around_mlps(Probe))
    seconds, graphs, eager = [], [], []
    for index in range(ROUNDS):
        _round(pair, rollouts(index, mini_batches=MINI_BATCHES))
        report = pair.report()
        seconds.append(report["capture_seconds"])
        graphs.append(report["graphs"])
        eager.append(report["eager"])
    assert eager[2:] == eager[2:3] * (ROUNDS - 2)
    assert seconds[2:] == seconds[2:3] * (ROUNDS - 2)
    # Training, and log-probabilities of the policy and of the reference.
    assert graphs[-1] == (2 + 1 + 1) * LAYERS
    report = pair.report()
    assert report["replays"] / report["calls"] > 0.95


def test_a_merged_policy_has_graphs_of_its_own(install: Install) -> None:
    install(capacities=("64:12",))
    pair = Pair(prepare=around_mlps(Probe))
    packs = [Micro(lengths=(9, 20)), Micro(lengths=(3, 30, 8), seed=1)]
    pair.evaluate(*packs)
    for index in range(4):
        pair.evaluate(*packs)
        undos = [_merge(trainer) for trainer in pair.both]
        before = pair.report()
        pair.evaluate(*packs)
        expected = 2 * LAYERS if index == 0 else 0
        assert (
            pair.report()["eager"].get("STATE_CHANGED", 0) - before["eager"].get("STATE_CHANGED", 0)
            == expected
        )
        for undo in undos:
            undo()
