# SPDX-License-Identifier: Apache-2.0
"""Whole training steps on packs: the wall of `forward_backward_func`, its floor, eager and Megatron's graphs.

The floor of a step is its own graphs launched back to back by a loop in C, plus the GPU time of what runs
outside of graphs. Each case runs in a process of its own (`python -m benchmarks.bench_step CASE/WHAT`), one
after another. No deterministic algorithms; Python's cyclic garbage waits while steps are timed; the
optimizer steps never. Eager and graphed steps take turns in one process, on the same packs. Models are
built on a side stream, as Megatron-LM does, so that eager adds gradients beside its backward pass.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import tables
from benchmarks.bare_loop import launch_all
from benchmarks.cases import MICRO_BATCHES, Case
from benchmarks.parts import Answer, against, caught, measure_part
from benchmarks.step_rivals import RIVALS, measure_rival
from benchmarks.step_trainer import (
    Batch,
    StepTrainer,
    batch_of,
    named_phases,
    seed_streams,
    without_collection,
)
from benchmarks.timeline import Timeline, read_timeline
from megagraph import megatron, results
from megagraph.cli.demo import quiet_megatron
from megagraph.cli.trainer import ModelOptions, process_groups
from megagraph.config import GraphConfig
from megagraph.dispatch import Capacity
from megagraph.megatron.installation import installed_plugin

WARM_UP_STEPS = 3
NUM_SEQS = 64  # as many documents as the shortest ones make in a pack: every pack fits
DISTINCT_STEPS = 4
ROUNDS = 16  # of small models; in every other one an eager step too
LARGE_ROUNDS = 8
TIMEOUT_SECONDS = 90
TIMELINE = "hidden 1024, packs of 4096"


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """A model on packs.

    Args:
        layers: of the model.
        hidden: size.
        tokens: of a pack.
        rivals: Megatron's graphs beside it.
    """

    layers: int
    hidden: int
    tokens: int
    rivals: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For tables."""
        return f"hidden {self.hidden}, packs of {self.tokens}"

    @property
    def is_small(self) -> bool:
        """Whether the floor is its bar, else eager."""
        return self.hidden <= 1024

    @property
    def model(self) -> ModelOptions:
        """Its shape: heads of 64, of 128 in large models."""
        heads = self.hidden // (64 if self.hidden <= 1024 else 128)
        return ModelOptions(
            layers=self.layers, hidden=self.hidden, heads=heads, max_tokens=self.tokens, bf16=True
        )

    @property
    def capacity(self) -> Capacity:
        """The only one."""
        return Capacity(tokens=self.tokens, num_seqs=NUM_SEQS, max_seqlen=self.tokens)

    def steps(self, device: torch.device, *, canonical: bool = False) -> list[list[Batch]]:
        """The batches of each step; with `canonical` all of one shape."""
        case = Case(
            name=self.name, model=self.model, max_packed_seqs=(NUM_SEQS,), mean_length=self.tokens // 8
        )
        capacity = self.capacity if canonical else None
        return [[batch_of(pack, device, capacity) for pack in step] for step in case.steps(DISTINCT_STEPS)]


CASES = {
    case.name: case
    for case in (
        StepCase(hidden=512, layers=24, tokens=2048),
        StepCase(hidden=1024, layers=24, tokens=4096, rivals=tuple(RIVALS)),
        StepCase(hidden=1024, layers=24, tokens=8192),
        StepCase(hidden=2048, layers=16, tokens=16384),
        StepCase(hidden=4096, layers=4, tokens=8192),
    )
}


def spread_ms(walls: Sequence[float]) -> dict[str, float]:
    """Median and fastest."""
    return {"median_ms": statistics.median(walls), "fastest_ms": min(walls)}


# -- ours and eager --------------------------------------------------------------------------------


def measure_ours(case: StepCase) -> Answer:
    """Graphed and eager steps in turn, the same graphs launched bare, and a trace of both."""
    megatron.install(GraphConfig(capacities=(case.capacity,), progress=False, log_interval=0))
    trainer = StepTrainer(case.model, beside=True)
    steps = case.steps(trainer.device)
    for index in range(WARM_UP_STEPS + 3):
        trainer.wall_ms(steps[index % len(steps)], graphs=True)
    launch = _bare_launches() if case.is_small else None
    graphed, eager, bare = [], [], []
    with without_collection():
        for index in range(ROUNDS if case.is_small else LARGE_ROUNDS):
            batches = steps[index % len(steps)]
            graphed.append(trainer.wall_ms(batches, graphs=True))
            if launch is not None:
                bare.append(_wall_ms(launch))
            if index % 2 == 0 or not case.is_small:
                eager.append(trainer.wall_ms(batches, graphs=False))
    _check_replays(megatron.reports()[-1])
    traced = _trace(trainer, steps[0], graphs=True)
    answer: Answer = {
        "graphed": spread_ms(graphed),
        "eager": spread_ms(eager),
        "bare": spread_ms(bare) if bare else None,
        "eager_parts_ms": traced.eager_span_us() / 1e3,
        "busy_ms": traced.busy_us() / 1e3,
    }
    if case.is_small:
        wall_us = statistics.median(graphed[::DISTINCT_STEPS]) * 1e3  # those of the traced packs
        answer["timeline"] = [[f.name, f.value, f.rival_value] for f in traced.figures(wall_us=wall_us)]
    else:
        whole = _trace(trainer, steps[0], graphs=False)
        answer["graph_kernels_ms"] = traced.graph_us() / 1e3
        answer["same_kernels_ms"] = (whole.graph_us() + whole.eager_us() - traced.eager_us()) / 1e3
    return answer


def _bare_launches() -> Callable[[], None]:
    """Launches the graphs of a whole step, forward and backward of each micro-batch."""
    plugin = installed_plugin()
    assert plugin is not None
    chain = plugin.all_graphs()[0].block.chain
    (variant,) = chain.variants.values()  # one capacity, training only
    forward, backward = chain.chunk.raw_graph_execs(variant, 0)
    if not forward or not backward:
        raise RuntimeError("no graphs were captured")
    execs = [*forward, *reversed(backward)]
    return lambda: launch_all(execs, MICRO_BATCHES)


def _wall_ms(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _check_replays(report: dict[str, Any]) -> None:
    """Raises `RuntimeError` where a timed step was not what it is taken for."""
    expected = {"WARMING_UP", "DISABLED"}
    others = {reason: count for reason, count in report["eager"].items() if reason not in expected}
    if others or report["replays"] == 0 or report["failures"]:
        raise RuntimeError(f"expected replays, got {others}, {report['failures']}")


def _trace(trainer: StepTrainer, batches: Sequence[Batch], *, graphs: bool) -> Timeline:
    """The second of two profiled steps; the first pays for the profiler's own start."""
    with named_phases(trainer), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(2):
            trainer.wall_ms(batches, graphs=graphs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        timeline = read_timeline(json.loads(path.read_text(encoding="utf-8")))
    if graphs != (timeline.graph_us() > 0):
        raise RuntimeError(
            f"the trace of a step with graphs={graphs} has {timeline.graph_us():.0f} us in graphs"
        )
    return timeline


# -- figures ---------------------------------------------------------------------------------------


def figures_of(case: StepCase, ours: Answer, rivals: dict[str, Answer]) -> list[results.Figure]:
    """The figures of one case."""

    def figure(what: str, value: float, unit: str, **more: Any) -> results.Figure:
        return results.Figure(name=f"{case.name}: {what}", value=value, unit=unit, **more)

    def floor(key: str) -> float | None:
        return None if ours["bare"] is None else float(ours["bare"][key] + ours["eager_parts_ms"])

    others = {"eager, the same kernels": ours["eager"]}
    others |= {f"{RIVALS[kind]}, canonical packs, our RoPE": answer for kind, answer in rivals.items()}
    figures = [
        against(
            f"{case.name}: step, {kind}",
            ours["graphed"][f"{kind}_ms"],
            "ms",
            rival,
            answer,
            itemgetter(f"{kind}_ms"),
            floor=floor(f"{kind}_ms"),
        )
        for kind in ("median", "fastest")
        for rival, answer in others.items()
    ]
    wall, eager_wall = ours["graphed"]["median_ms"], ours["eager"]["median_ms"]
    least = floor("median_ms")
    if least is not None:
        figures += [
            figure("forward_backward_func wall / floor", wall / least, "ratio", bar=1.03),
            figure("floor: graphs launched by a bare loop", ours["bare"]["median_ms"], "ms"),
            figure("floor: GPU time outside of graphs", ours["eager_parts_ms"], "ms"),
        ]
    else:
        kernels = ours["graph_kernels_ms"] / ours["same_kernels_ms"]
        figures += [
            figure("wall / eager wall", wall / eager_wall, "ratio", bar=1.0),
            figure("kernel time inside graphs / the same kernels eager", kernels, "ratio", bar=1.01),
            figure(
                "kernel time inside graphs",
                ours["graph_kernels_ms"],
                "ms",
                rival="the same kernels eager",
                rival_value=ours["same_kernels_ms"],
            ),
        ]
    return [*figures, figure("GPU busy in the traced step", ours["busy_ms"], "ms")]


def timeline_figures(rows: Sequence[tuple[str, float, float | None]]) -> list[results.Figure]:
    """The figures of a timeline, as a process told them."""
    return [
        results.Figure(
            name=name,
            value=value,
            unit="us",
            rival=None if rival is None else "without the profiler",
            rival_value=rival,
        )
        for name, value, rival in rows
    ]


def run() -> None:
    """Measures every case; writes benchmarks/results/step.json and step_timeline.json."""
    figures: list[results.Figure] = []
    for case in CASES.values():
        ours = _ask(f"{case.name}/ours")
        rivals = {kind: caught(partial(_ask, f"{case.name}/{kind}")) for kind in case.rivals}
        figures += figures_of(case, ours, rivals)
        if case.name == TIMELINE:
            tables.publish("step_timeline", timeline_figures(ours["timeline"]))
    tables.publish("step", figures)


def _ask(part: str) -> Answer:
    return measure_part("benchmarks.bench_step", part, timeout=TIMEOUT_SECONDS)


def _measure(part: str) -> None:
    name, _, kind = part.partition("/")
    quiet_megatron()
    with process_groups():
        seed_streams(for_graphs=kind != "ours")
        if kind == "ours":
            print(json.dumps(measure_ours(CASES[name])), flush=True)
            megatron.uninstall()
            return
        steps = CASES[name].steps(torch.device("cuda"), canonical=True)
        print(
            json.dumps(caught(lambda: spread_ms(measure_rival(CASES[name].model, kind, steps)))), flush=True
        )
        # The group would wait for ever for what a graph of Megatron's holds of it.
        os._exit(0)


if __name__ == "__main__":
    _measure(sys.argv[1])
