# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks that share experts which take as many rows from each, each rank on packs of its own."""

import contextlib
from collections.abc import Iterator
from typing import Any

import moe_jobs
import moe_rig
import torch
from host_rig import OwnModel
from megatron_rig import Micro, evaluate, graph_config
from moe_rig import ExpertTrainer, expert_step
from parallel_jobs import MISFIT
from same_bits import assert_same_bits
from streams import seed_streams
from torch import distributed

import megagraph
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


def learn(**options: Any) -> dict[str, Any]:
    """Trains with capacities that are learned from a step of packs of equal rows, and of other documents."""

    def steps_of(count: int, *, seed: int, misfits: bool) -> list[list[Micro]]:
        shapes = [(16, 48), (60, 2, 2), (64,)] if seed else [(64,), (8, 56), (12, 50, 1, 1)]
        warm_up = [Micro(lengths=lengths, seed=100 * seed + index) for index, lengths in enumerate(shapes)]
        later = [(9, 4), (61,), (30, 3)] if seed else [(55,), (20, 3), (7, 8, 9)]
        return [
            warm_up,
            *([Micro(lengths=lengths, seed=seed) for lengths in later] for _ in range(count - 1)),
        ]

    return moe_jobs.train_spread(steps_of=steps_of, plugin={"capacities": ()}, **options)


@contextlib.contextmanager
def _spread() -> Iterator[None]:
    """Experts over all ranks, which run on the CPU, too."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=distributed.get_world_size())
    with moe_rig.experts_on_cpu():
        yield


def _trainer(**changes: Any) -> ExpertTrainer:
    seed_streams()
    return ExpertTrainer("E-", expert_model_parallel_size=distributed.get_world_size(), **changes)


def skip_alone(**changes: Any) -> dict[str, Any]:
    """Rank 0 alone switches graphs off for a step; both evaluate between steps.

    Returns:
        The report of the model with graphs, which had the bits of one without on every rank.
    """
    rank = distributed.get_rank()
    steps = steps_of(5, seed=rank, misfits=rank == 1)
    megagraph.install(graph_config(capacities=(SMALL, LARGE), cuda_graph_modules=("attn", "moe_router")))
    with _spread():
        trainers = [_trainer(**changes) for _ in range(2)]
        found: list[list[Any]] = []
        for trainer in trainers:
            is_reference = trainer is trainers[0]
            found.append([])
            moe_rig.metrics()
            for index, micros in enumerate(steps):
                is_eager = is_reference or (index == 3 and rank == 0)
                found[-1].append(expert_step(trainer, micros, eager=is_eager))
                found[-1].append(evaluate(trainer, micros, eager=is_reference))
        for one, other in zip(*found, strict=True):
            if isinstance(one, list):
                assert all(map(torch.equal, one, other))
            else:
                assert_same_bits(one, other)
    report: dict[str, Any] = megagraph.reports()[1]
    return report


def differ(**changes: Any) -> str:
    """One rank's pack fits no capacity, and the other's has other rows. Returns what a step says."""
    rank = distributed.get_rank()
    megagraph.install(graph_config(cuda_graph_modules=("attn", "moe_router")))
    with _spread():
        trainer = _trainer(**changes)
        expert_step(trainer, [Micro(lengths=(20 + rank,))])
        try:
            expert_step(trainer, [Micro(lengths=MISFIT if rank else (20, 20))])
        except RuntimeError as error:
            return str(error)
    return ""


def override(**changes: Any) -> dict[str, Any]:
    """Trains on packs of equal rows while a host's forward is entered. Returns the report."""
    rank = distributed.get_rank()
    megagraph.install(graph_config(cuda_graph_modules=("attn", "moe_router")))
    with _spread():
        trainer = _trainer(**changes)
        trainer.chunk.__class__ = OwnModel
        for _ in range(3):
            expert_step(trainer, [Micro(lengths=(40, 8) if rank else (28, 20))])
    (report,) = megagraph.reports()
    return report
