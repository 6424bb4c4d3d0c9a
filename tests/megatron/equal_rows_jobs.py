# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks that share experts which take as many rows from each, each rank on packs of its own."""

from typing import Any
from unittest import mock

import moe_jobs
from megatron_rig import Micro

from megagraph.decide.dispatch import Capacity
from megagraph.megatron.parallel import peers

FEW = Capacity(tokens=64, num_seqs=3, max_seqlen=48)
MANY = Capacity(tokens=64, num_seqs=5, max_seqlen=48)
EVERY = 5  # packs, of which one fits no capacity
MISFITS = (5,) * 6, (60,)  # of too many documents, of one that is too long


def steps_of(count: int, *, seed: int, misfits: bool) -> list[list[Micro]]:
    """Steps of three packs of other rows on each rank. With `misfits` every fifth fits no capacity."""
    shapes = [(10, 30, 24), (20, 8), (30,), (2, 2, 2, 20), (16, 16, 16, 16), (7, 9), (33, 7)]
    steps: list[list[Micro]] = []
    for index in range(count):
        steps.append([])
        for number in range(3 * index, 3 * index + 3):
            lengths = shapes[(number + 3 * seed) % len(shapes)]
            if misfits and number % EVERY == EVERY - 1:
                lengths = MISFITS[number // EVERY % 2]
            tail = 3 if number % 4 == 1 and sum(lengths) < 60 else 0
            steps[-1].append(Micro(lengths=lengths, seed=100 * seed + number, tail=tail))
    return steps


def train(**options: Any) -> tuple[dict[str, Any], int]:
    """Trains on these packs, with graphs of two capacities.

    Returns:
        The report, and how often this rank has asked others on the host.
    """
    with mock.patch.object(peers, "_gloo_group", wraps=peers._gloo_group) as asked:
        report = moe_jobs.train_spread(
            **{"steps_of": steps_of, "plugin": {"capacities": (FEW, MANY)}, **options}
        )
    return report, asked.call_count


def learn(**options: Any) -> tuple[dict[str, Any], int]:
    """Trains with capacities that are learned from a step of packs of equal rows, and of other documents.

    Returns:
        As `train()`.
    """

    def steps_of(count: int, *, seed: int, misfits: bool) -> list[list[Micro]]:
        shapes = [(16, 48), (60, 2, 2), (64,)] if seed else [(64,), (8, 56), (12, 50, 1, 1)]
        warm_up = [Micro(lengths=lengths, seed=100 * seed + index) for index, lengths in enumerate(shapes)]
        later = [(9, 4), (61,), (30, 3)] if seed else [(55,), (20, 3), (7, 8, 9)]
        return [
            warm_up,
            *([Micro(lengths=lengths, seed=seed) for lengths in later] for _ in range(count - 1)),
        ]

    return train(steps_of=steps_of, plugin={"capacities": ()}, **options)
