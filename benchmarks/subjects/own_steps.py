# SPDX-License-Identifier: Apache-2.0
"""Times graphed and eager steps on the same packs, the same graphs launched bare, and Megatron's graphs."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring.children import Answer, caught
from benchmarks.measuring.clocks import wall_ms
from benchmarks.measuring.timeline import Timeline, read_timeline
from benchmarks.subjects.hosts import check_replays, install, prepare_megatrons_graphs
from benchmarks.subjects.inside import bare_step, our_rope
from benchmarks.subjects.packs import MICRO_BATCHES, Case, filled, model_options
from benchmarks.subjects.steps import Batch, StepTrainer, batch_of, named_phases, without_collection
from megagraph import megatron
from megagraph.decide.dispatch import Capacity
from megagraph.demo.packers import Pack
from megagraph.demo.trainer import ModelOptions

NUM_SEQS = 64  # as many documents as the shortest ones make in a pack: every pack fits
WARM_UP_STEPS = 3
ROUNDS = 5  # of each distinct step of a small model
LARGE_ROUNDS = 2
UNPATCHED_ROUNDS = 2  # before ours, and as many after it; of a large model half
RIVALS = {"local": "Megatron's local graphs", "full_iteration": "Megatron's full iteration graph"}
RIVAL_WARM_UP_STEPS, RIVAL_ROUNDS = 6, 12

Steps = Sequence[Sequence[Batch]]


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """A model on packs whose whole training steps are timed."""

    layers: int
    hidden: int
    tokens: int  # of a pack
    rivals: tuple[str, ...] = ()  # of `RIVALS`, beside it

    @property
    def name(self) -> str:
        """For tables."""
        return f"hidden {self.hidden}, packs of {self.tokens}"

    @property
    def is_small(self) -> bool:
        """Whether the floor is its bar, else eager."""
        return self.hidden <= 1024

    @property
    def distinct_steps(self) -> int:
        """Steps that differ. Of a small model each is traced."""
        return 3 if self.is_small else 4

    @property
    def model(self) -> ModelOptions:
        """Its shape: heads of 64, of 128 in large models."""
        head_dim = 64 if self.is_small else 128
        return model_options(self.hidden, layers=self.layers, tokens=self.tokens, head_dim=head_dim)

    @property
    def capacity(self) -> Capacity:
        """The only one."""
        return Capacity(tokens=self.tokens, num_seqs=NUM_SEQS, max_seqlen=self.tokens)

    def lognormal(self, steps: int) -> list[list[Pack]]:
        """The packs of some steps."""
        return Case(
            name=self.name, model=self.model, max_packed_seqs=(NUM_SEQS,), mean_length=self.tokens // 8
        ).steps(steps)

    def packs(self) -> list[list[Pack]]:
        """The packs of each distinct step, the same for every way to run it, and full.

        A small model's step has one pack several times: graphs that are launched again, without staging,
        then do the work of the whole step.
        """
        steps = [[filled(pack, self.tokens) for pack in step] for step in self.lognormal(self.distinct_steps)]
        return [[step[0]] * MICRO_BATCHES for step in steps] if self.is_small else steps

    def batches(self, device: torch.device, *, canonical: bool = False) -> list[list[Batch]]:
        """`packs()` on the device; with `canonical` all of one shape."""
        capacity = self.capacity if canonical else None
        return [[batch_of(pack, device, capacity) for pack in step] for step in self.packs()]

    def rounds(self, count: int) -> list[int]:
        """Which of the distinct steps each of `count` rounds runs: each as often as the others."""
        if count % self.distinct_steps:
            raise ValueError(f"expected rounds that {self.distinct_steps} steps share evenly, got {count}")
        return [index % self.distinct_steps for index in range(count)]


def measure_ours(case: StepCase) -> Answer:
    """Graphed and eager steps in turn, unpatched ones before and after them, and what their floor is.

    Returns:
        Walls in ms of each round, `graphed`, `eager` and of a small model also `bare`, and which distinct
        step it ran, `order`; `outside_ms` of graphs by distinct step of a small model; of one traced step
        `busy_ms`, `kernels_ms` and the `timeline`; `unpatched`, its own walls, order and kernels.
    """
    trainer = StepTrainer(case.model, beside=True)
    steps = case.batches(trainer.device)
    before = caught(lambda: _unpatched(trainer, case, steps))
    install(capacities=(case.capacity,))
    answer = _in_turns(trainer, case, steps)
    check_replays(megatron.reports()[-1], "DISABLED")
    megatron.uninstall()
    after = caught(lambda: _unpatched(trainer, case, steps))
    if "error" in before or "error" in after:
        return {**answer, "unpatched": before if "error" in before else after}
    walls, order = (before[name] + after[name] for name in ("walls", "order"))
    return {**answer, "unpatched": {**after, "walls": walls, "order": order}}


def _unpatched(trainer: StepTrainer, case: StepCase, steps: Steps) -> Answer:
    """Eager steps with nothing installed but our RoPE; attention is ours by the model's spec."""
    rounds = UNPATCHED_ROUNDS if case.is_small else UNPATCHED_ROUNDS // 2
    with our_rope(), without_collection():
        for index in range(WARM_UP_STEPS):
            trainer.wall_ms(steps[index % len(steps)], graphs=True)
        order = case.rounds(rounds * len(steps))
        walls = [trainer.wall_ms(steps[index], graphs=True) for index in order]
        kernels = _trace(trainer, steps[0]).eager_us() / 1e3
    return {"walls": walls, "order": order, "kernels_ms": kernels}


def _in_turns(trainer: StepTrainer, case: StepCase, steps: Steps) -> Answer:
    for index in range(WARM_UP_STEPS + 3):
        trainer.wall_ms(steps[index % len(steps)], graphs=True)
    trainer.wall_ms(steps[0], graphs=False)
    launch = partial(bare_step(trainer), MICRO_BATCHES) if case.is_small else None
    order = case.rounds((ROUNDS if case.is_small else LARGE_ROUNDS) * len(steps))
    graphed, eager, bare = [], [], []
    with without_collection():
        for index in order:
            graphed.append(trainer.wall_ms(steps[index], graphs=True))
            if launch is not None:  # with what this step has staged
                bare.append(wall_ms(launch))
            eager.append(trainer.wall_ms(steps[index], graphs=False))
    traced = [_trace(trainer, batches) for batches in (steps if case.is_small else steps[:1])]
    first = traced[0]
    if not first.graph_us():
        raise RuntimeError("the trace of a graphed step has no graphs")
    return {
        **{"order": order, "graphed": graphed, "eager": eager, "bare": bare},
        "outside_ms": [timeline.eager_span_us() / 1e3 for timeline in traced] if case.is_small else [],
        "busy_ms": first.busy_us() / 1e3,
        "kernels_ms": (first.graph_us() + first.eager_us()) / 1e3,
        "timeline": first.rows_us(),
    }


def _trace(trainer: StepTrainer, batches: Sequence[Batch]) -> Timeline:
    """The second of two profiled steps; the first pays for the profiler's own start."""
    with named_phases(trainer), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(2):
            trainer.wall_ms(batches, graphs=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        return read_timeline(json.loads(path.read_text(encoding="utf-8")))


def measure_rival(case: StepCase, kind: str) -> Answer:
    """Walls of steps in ms, with our attention and RoPE kernels: Megatron's RoPE reads offsets on the host.

    Packs are padded to one shape. Leaves graphs behind that hold the process group: its destruction may
    wait for them for ever.
    """
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    prepare_megatrons_graphs(MICRO_BATCHES)
    is_full = kind == "full_iteration"

    def wrap(schedule: Callable[..., Any]) -> Any:
        return FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=2)

    steps = case.batches(torch.device("cuda"), canonical=True)
    with our_rope():
        # Megatron's local graphs choose a stream themselves while the model is built.
        config: dict[str, Any] = {"cuda_graph_impl": kind, "cuda_graph_modules": []}
        trainer = StepTrainer(case.model, beside=is_full, wrap=wrap if is_full else None, **config)
        for index in range(RIVAL_WARM_UP_STEPS):
            trainer.wall_ms(steps[index % len(steps)], graphs=True)
        with without_collection():
            return {"walls": [trainer.wall_ms(steps[i], graphs=True) for i in case.rounds(RIVAL_ROUNDS)]}
