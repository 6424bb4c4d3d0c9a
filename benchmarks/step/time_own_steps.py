# SPDX-License-Identifier: Apache-2.0
"""Times graphed and eager steps on the same packs, the same graphs launched bare, and traces them."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.hosts.prepare_megatron import our_rope
from benchmarks.measuring.compare import Answer, caught, median_ratio
from benchmarks.measuring.launch_bare import BareLoop
from benchmarks.measuring.read_timeline import Timeline, read_timeline
from benchmarks.packs.cases import MICRO_BATCHES
from benchmarks.packs.step_cases import StepCase, in_rounds
from benchmarks.step.train_steps import Batch, StepTrainer, named_phases, without_collection
from megagraph import megatron
from megagraph.config import GraphConfig
from megagraph.megatron.patch.installation import installed_plugin

WARM_UP_STEPS = 3
ROUNDS = 5  # of each distinct step of a small model
LARGE_ROUNDS = 2
UNPATCHED_ROUNDS = 2  # before ours, and as many after it; of a large model half

Steps = Sequence[Sequence[Batch]]


def spread_ms(walls: Sequence[float]) -> dict[str, float]:
    """Median and fastest."""
    return {"median_ms": statistics.median(walls), "fastest_ms": min(walls)}


def spread_by_step(walls: Sequence[float], steps: Sequence[int]) -> Answer:
    """Median and fastest, and the median of each distinct step.

    Args:
        walls: of each round, in ms.
        steps: which of the distinct steps each round ran.
    """
    of_step = {
        step: [w for w, s in zip(walls, steps, strict=True) if s == step] for step in sorted(set(steps))
    }
    return {**spread_ms(walls), "by_step_ms": [statistics.median(of) for of in of_step.values()]}


def floor_answer(
    walls: Sequence[float], bare: Sequence[float], steps: Sequence[int], outside: Sequence[float]
) -> Answer:
    """The floors of steps, each from its own round and its own packs.

    Args:
        walls: of each round, in ms.
        bare: the same graphs launched in a loop, of each round.
        steps: which of the distinct steps each round ran.
        outside: GPU time outside of graphs of each distinct step.
    """
    floors = [launched + outside[step] for launched, step in zip(bare, steps, strict=True)]
    return {
        **spread_ms(floors),
        "wall_over_floor": median_ratio(walls, floors),
        "bare_ms": statistics.median(bare),
        "outside_ms": statistics.median(outside),
    }


def measure_ours(case: StepCase) -> Answer:
    """Graphed and eager steps in turn, unpatched ones before and after them, and what their floor is."""
    trainer = StepTrainer(case.model, beside=True)
    steps = case.batches(trainer.device)
    before = caught(lambda: _unpatched(trainer, case, steps))
    megatron.install(GraphConfig(capacities=(case.capacity,), progress=False, log_interval=0))
    answer = _in_turns(trainer, case, steps)
    _check_replays(megatron.reports()[-1])
    megatron.uninstall()
    after = caught(lambda: _unpatched(trainer, case, steps))
    return {**answer, "unpatched": _joined(before, after)}


def _joined(before: Answer, after: Answer) -> Answer:
    for answer in (before, after):
        if "error" in answer:
            return answer
    walls, order = (before[name] + after[name] for name in ("walls", "order"))
    return {**spread_by_step(walls, order), "kernels_ms": after["kernels_ms"]}


def _unpatched(trainer: StepTrainer, case: StepCase, steps: Steps) -> Answer:
    """Eager steps with nothing installed but our RoPE; attention is ours by the model's spec."""
    rounds = UNPATCHED_ROUNDS if case.is_small else UNPATCHED_ROUNDS // 2
    with our_rope(), without_collection():
        for index in range(WARM_UP_STEPS):
            trainer.wall_ms(steps[index % len(steps)], graphs=True)
        order = in_rounds(len(steps), rounds * len(steps))
        walls = [trainer.wall_ms(steps[index], graphs=True) for index in order]
        kernels = _trace(trainer, steps[0]).eager_us() / 1e3
    return {"walls": walls, "order": order, "kernels_ms": kernels}


def _in_turns(trainer: StepTrainer, case: StepCase, steps: Steps) -> Answer:
    for index in range(WARM_UP_STEPS + 3):
        trainer.wall_ms(steps[index % len(steps)], graphs=True)
    trainer.wall_ms(steps[0], graphs=False)
    launch = _bare_launches() if case.is_small else None
    order = in_rounds(len(steps), (ROUNDS if case.is_small else LARGE_ROUNDS) * len(steps))
    graphed, eager, bare = [], [], []
    with without_collection():
        for index in order:
            graphed.append(trainer.wall_ms(steps[index], graphs=True))
            if launch is not None:  # with what this step has staged
                bare.append(_wall_ms(launch))
            eager.append(trainer.wall_ms(steps[index], graphs=False))
    traced = [_trace(trainer, batches) for batches in (steps if case.is_small else steps[:1])]
    if not traced[0].graph_us():
        raise RuntimeError("the trace of a graphed step has no graphs")
    answer: Answer = {
        "graphed": spread_by_step(graphed, order),
        "eager": spread_by_step(eager, order),
        "floor": None,
        "busy_ms": traced[0].busy_us() / 1e3,
        "kernels_ms": (traced[0].graph_us() + traced[0].eager_us()) / 1e3,
    }
    if case.is_small:
        outside = [timeline.eager_span_us() / 1e3 for timeline in traced]
        answer["floor"] = floor_answer(graphed, bare, order, outside)
        wall_us = answer["graphed"]["by_step_ms"][0] * 1e3  # of the traced packs
        answer["timeline"] = [[f.name, f.value, f.rival_value] for f in traced[0].figures(wall_us=wall_us)]
    return answer


def _bare_launches() -> Callable[[], None]:
    """Launches the graphs of a whole step, forward and backward of each micro-batch."""
    plugin = installed_plugin()
    assert plugin is not None
    chain = plugin.all_graphs()[0].block.chain
    (variant,) = chain.variants.values()  # one capacity, training only
    forward, backward = chain.core.raw_graph_execs(variant, 0)
    if not forward or not backward:
        raise RuntimeError("no graphs were captured")
    return partial(BareLoop([*forward, *reversed(backward)]), MICRO_BATCHES)


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


def _trace(trainer: StepTrainer, batches: Sequence[Batch]) -> Timeline:
    """The second of two profiled steps; the first pays for the profiler's own start."""
    with named_phases(trainer), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(2):
            trainer.wall_ms(batches, graphs=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        return read_timeline(json.loads(path.read_text(encoding="utf-8")))
