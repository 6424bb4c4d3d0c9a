# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's own adapters: on, off, and switched inside of a step, with the bits of eager."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bridge_rig import adapt, lora_linear, wrappers
from megatron_rig import LAYERS, ONE, TWO, Install, Micro, Pair, Step, evaluate, forward, grads, schedule
from rl_rig import rollouts
from same_bits import assert_same_bits

from megagraph.demo.trainer import Trainer

ROUNDS = 50 if torch.cuda.is_available() else 8


@pytest.fixture
def pair(install: Install) -> Pair:
    """Two models with adapters of the same weights."""
    lora_linear()
    install(capacities=("64:12",))
    return Pair(prepare=adapt)


@contextlib.contextmanager
def disabled(*trainers: Any) -> Iterator[None]:
    """As Megatron-Bridge's `PEFT.disable_adapter()` does it."""
    all_of = [wrapper for trainer in trainers for wrapper in wrappers(trainer)]
    for wrapper in all_of:
        wrapper.disable_adapter_layers()
    try:
        yield
    finally:
        for wrapper in all_of:
            wrapper.enable_adapter_layers()


def test_a_reference_without_adapters_beside_a_policy_with_them(pair: Pair) -> None:
    eager = []
    for index in range(ROUNDS):
        packs = rollouts(index, mini_batches=2)
        everything = [micro for mini_batch in packs for micro in mini_batch]
        pair.evaluate(*everything)
        with disabled(*pair.both):
            pair.evaluate(*everything)
        for mini_batch in packs:
            pair.step(*mini_batch)
        eager.append(pair.report()["eager"])
    assert eager[2:] == eager[2:3] * (ROUNDS - 2) and set(eager[-1]) <= {"WARMING_UP", "STATE_CHANGED"}
    report = pair.report()
    assert len(report["states"]) == 3  # training, and both modes of evaluation
    assert report["failures"] == [] and report["verification"]["unverified"] == 0
    # Nothing but the adapters matters.
    with disabled(pair.eager):
        without = evaluate(pair.eager, [ONE], eager=True)
    assert not torch.equal(without[0], evaluate(pair.eager, [ONE], eager=True)[0])


def _step_with_a_reference(trainer: Trainer) -> Step:
    """As a DPO step: each micro-batch twice, first without adapters and without gradients."""

    def micros() -> Iterator[Micro]:
        for micro in (ONE, TWO):
            with disabled(trainer), torch.no_grad():
                references.append(forward(trainer.model, micro, trainer.device)[0])
            yield micro

    references: list[torch.Tensor] = []
    trainer.zero_grad()
    losses = schedule(trainer.model, micros(), 2, trainer.device)
    left = Step(losses=[*losses, *references], grads=grads(trainer.chunk))
    trainer.update()
    return left


def test_a_reference_inside_of_a_step_is_never_the_policy(pair: Pair) -> None:
    for _ in range(6):
        assert_same_bits(*pair.each(_step_with_a_reference))
    report = pair.report()
    assert report["replays"] >= 4 * 2 * LAYERS
    assert report["calls"] == 6 * 4 * LAYERS
