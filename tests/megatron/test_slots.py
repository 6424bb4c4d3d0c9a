# SPDX-License-Identifier: Apache-2.0
"""Several micro-batches of a model in flight: as many as there are slots replay, with the bits of eager."""

import gc
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from megatron_rig import LAYERS, ON_GPU, Install, Micro, Pair, Step, forward, grads
from same_bits import assert_same_bits

import megagraph
from megagraph.demo.trainer import Trainer

STEPS = 8 if ON_GPU else 2
# Forwards and backwards of micro-batches by their number, in the order of a host.
ORDERS = {
    "one after another": "F0 B0 F1 B1 F2 B2",
    "1F1B": "F0 F1 B0 F2 B1 B2",
    "last first": "F0 F1 B1 B0 F2 B2",
    "all forwards first": "F0 F1 F2 B0 B1 B2",
}


def _micros(seed: int) -> list[Micro]:
    return [Micro(lengths=(3 + seed % 5 + i, 20 - i, 4 + seed % 7), seed=3 * seed + i) for i in range(3)]


def _run(trainer: Trainer, order: str, micros: Sequence[Micro]) -> Step:
    """A step outside of any schedule."""
    trainer.zero_grad()
    losses: dict[int, Any] = {}
    kept = []
    for what, number in order.split():
        index = int(number)
        if what == "F":
            out, reduce = forward(trainer.model, micros[index], trainer.device)
            losses[index], left = reduce(out)
            kept.append(left["losses"])
            del out
        else:
            losses.pop(index).backward()
    return Step(losses=kept, grads=grads(trainer.chunk))


@pytest.mark.parametrize(
    ("order", "slots"),
    [*((it, 2) for it in ORDERS), ("1F1B", 1), ("all forwards first", 1), ("all forwards first", 3)],
)
def test_as_many_micro_batches_replay_as_there_are_slots(order: str, slots: int) -> None:
    pair = Pair(plugin={"cuda_graph_slots": slots})
    pair.step(*_micros(0), times=2)
    before = pair.report()
    assert before["graphs"] == 2 * LAYERS * slots and before["verification"]["verified"] == 1
    for seed in range(1, STEPS + 1):
        assert_same_bits(
            *pair.each(partial(_run, order=ORDERS[order], micros=_micros(seed))), f"step {seed}:"
        )
        for trainer in pair.both:
            trainer.update()
    in_flight = accumulate(1 if task.startswith("F") else -1 for task in ORDERS[order].split())
    report = pair.report()
    eager_calls = report["eager"].get("NO_FREE_SLOT", 0)
    assert report["replays"] - before["replays"] + eager_calls == STEPS * 3 * LAYERS
    assert (eager_calls == 0) is (max(in_flight) <= slots)
    assert set(report["eager"]) <= {"WARMING_UP", "NO_FREE_SLOT"}
    if slots == 1 and order == "1F1B":
        assert eager_calls == STEPS * LAYERS


def test_a_slot_that_somebody_holds_leaves_the_others() -> None:
    pair = Pair(plugin={"cuda_graph_slots": 2})
    pair.step(*_micros(0), times=2)
    trainer = pair.graphed
    trainer.zero_grad()
    held: list[Any] = []
    handle = trainer.chunk.decoder.register_forward_hook(lambda _block, _args, out: held.append(out))
    forward(trainer.model, _micros(1)[0], trainer.device)
    handle.remove()
    before = pair.report()["replays"]
    pair.step(*_micros(2))
    assert held and pair.report()["replays"] == before + 3 * LAYERS


@pytest.mark.gpu
def test_each_slot_has_memory_of_its_own(install: Install) -> None:
    """Of what is kept for a backward; what is temporary all of them share."""
    sizes = []
    for slots in (2, 3, 4):
        install(cuda_graph_slots=slots)
        pair = Pair()
        pair.step(*_micros(0), times=2)
        sizes.append(pair.report()["pool_bytes"])
        megagraph.uninstall()
        del pair
        gc.collect()
        torch.cuda.empty_cache()
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0
