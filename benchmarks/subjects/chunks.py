# SPDX-License-Identifier: Apache-2.0
"""Training steps whose layers have a graph each, or one for all of them: launches, times, memory, capture."""

from functools import partial

import torch

from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import graph_launches, host_us, outside_bytes
from benchmarks.subjects.hosts import check_replays, install
from benchmarks.subjects.packs import MICRO_BATCHES
from benchmarks.subjects.steps import WARM_UP_STEPS, StepCase, StepTrainer, without_collection
from megagraph import megatron

FURTHER_STEPS = 3  # the first of them captures
ROUNDS = 10  # of each distinct step
HOST_SAMPLES = 30


def measure_granularity(case: StepCase, granularity: str) -> Answer:
    """Steps of a model, graphed and eager in turns.

    Args:
        case: the model and its packs.
        granularity: `cuda_graph_granularity`.

    Returns:
        `graphed` and `eager`, walls in ms; `host` time of a graphed step in us; `launches` of graphs in a
        micro-batch, `graphs`, `sites`, bytes of their `pools` and of the `executables`, `capture_seconds`,
        and the most that torch `reserved`.
    """
    install(
        capacities=(case.capacity,),
        cuda_graph_warmup_steps=WARM_UP_STEPS,
        cuda_graph_granularity=granularity,
    )
    trainer = StepTrainer(case.model, beside=True)
    steps = case.batches(trainer.device)
    for index in range(WARM_UP_STEPS + FURTHER_STEPS):
        if index == WARM_UP_STEPS:
            before = outside_bytes()
        trainer.wall_ms(steps[index % len(steps)], graphs=True)
    executables, reserved = outside_bytes() - before, torch.cuda.max_memory_reserved()
    graphed, eager = [], []
    with without_collection():
        for index in case.rounds(ROUNDS * len(steps)):
            graphed.append(trainer.wall_ms(steps[index], graphs=True))
            eager.append(trainer.wall_ms(steps[index], graphs=False))
        step = partial(trainer.forward_backward, steps[0])  # type: ignore[arg-type]  # hands each on as it is
        host = host_us(step, repeats=HOST_SAMPLES)
    launches = graph_launches(step) / MICRO_BATCHES
    report = megatron.reports()[-1]
    check_replays(report, "DISABLED")
    return {
        **{"graphed": graphed, "eager": eager, "host": host, "launches": launches, "reserved": reserved},
        **{"graphs": report["graphs"], "sites": report["sites"], "pools": report["pool_bytes"]},
        **{"executables": executables, "capture_seconds": report["capture_seconds"]},
    }
