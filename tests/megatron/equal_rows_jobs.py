# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks that share experts which take as many rows from each, each rank on packs of its own."""

from typing import Any

import moe_jobs
from megatron_rig import Micro
from parallel_jobs import MISFIT

from megagraph.decide.dispatch import Capacity

SMALL = Capacity(tokens=32, num_seqs=4, max_seqlen=32)
LARGE = Capacity(tokens=64, num_seqs=5, max_seqlen=64)
EVERY = 5  # packs, of which one fits no capacity
AS_LONG = (12, sum(MISFIT) - 12)


def steps_of(count: int, *, seed: int, misfits: bool) -> list[list[Micro]]:
    """Steps of three packs of one capacity or the other; every fifth has the rows of every rank's.

    With `misfits` that one fits no capacity.
    """
    shapes = [(10, 30, 24), (20, 8), (30,), (2, 2, 2, 20), (16, 16, 16, 16), (7, 9), (33, 7)]
    steps: list[list[Micro]] = []
    for index in range(count):
        steps.append([])
        for micro in range(3):
            number = index * 3 + micro
            lengths = shapes[(number + 3 * seed) % len(shapes)]
            if is_last := number % EVERY == EVERY - 1:
                lengths = MISFIT if misfits else AS_LONG
            tail = 3 if number % 4 == 1 and not is_last and sum(lengths) < 60 else 0
            steps[-1].append(Micro(lengths=lengths, seed=100 * seed + number, tail=tail))
    return steps


def train(**options: Any) -> dict[str, Any]:
    """Trains on these packs, with graphs of two capacities."""
    plugin = {"capacities": (SMALL, LARGE)}
    return moe_jobs.train_spread(steps_of=steps_of, plugin=plugin, **options)
