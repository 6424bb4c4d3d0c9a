# SPDX-License-Identifier: Apache-2.0
"""Whole training steps on packs: the wall of `forward_backward_func`, its floor, eager and Megatron's graphs.

The floor of a step is its own graphs launched back to back by a loop in C, plus the GPU time of what runs
outside of graphs. Each case runs in a process of its own (`python -m benchmarks.bench_step CASE/WHAT`), one
after another. No deterministic algorithms; Python's cyclic garbage waits while steps are timed; the
optimizer steps never. Every way to run a step has the same packs. Models are built on a side stream, as
Megatron-LM does, so that eager adds gradients beside its backward pass.

Packs are full: documents of many lengths, the last one cut. So every way to run a step has the same physical
tokens. Eager is measured twice: with the plugin, graphs disabled, which pads packs to their capacity as
graphs need them, and so launches attention for all document slots; and without it, on packs as they come,
with our attention and RoPE, which Megatron's local layers need.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from benchmarks.hosts.prepare_megatron import seed_streams
from benchmarks.measuring.compare import Answer, against_each, caught
from benchmarks.measuring.publish import Measurement, publish
from benchmarks.measuring.run_children import measure_part, try_part
from benchmarks.packs.step_cases import StepCase
from benchmarks.step.time_own_steps import measure_ours, spread_ms
from benchmarks.step.time_step_rivals import RIVALS, measure_rival
from megagraph import results
from megagraph.cli.demo import quiet_megatron
from megagraph.demo.trainer import process_groups

TIMEOUT_SECONDS = 150
TIMELINE = "hidden 1024, packs of 4096"
SAME_PACKS = "eager with the plugin, graphs disabled"
UNPATCHED = "unpatched eager, packs as they come, our attention and RoPE"
_MODULE = "benchmarks.bench_step"
CASES = {
    case.name: case
    for case in (
        StepCase(hidden=512, layers=24, tokens=2048),
        StepCase(hidden=1024, layers=24, tokens=4096, rivals=tuple(RIVALS)),
        StepCase(hidden=1024, layers=24, tokens=8192),
        StepCase(hidden=2048, layers=8, tokens=16384),
        StepCase(hidden=4096, layers=4, tokens=8192),
    )
}


def figures_of(case: StepCase, ours: Answer, rivals: Mapping[str, Answer]) -> list[results.Figure]:
    """The figures of one case."""

    def figure(what: str, value: float, unit: str, **more: Any) -> results.Figure:
        return results.Figure(name=f"{case.name}: {what}", value=value, unit=unit, **more)

    floor, graphed = ours["floor"], ours["graphed"]
    others = {SAME_PACKS: ours["eager"], UNPATCHED: ours["unpatched"]}
    others |= {f"{RIVALS[kind]}, canonical packs, our RoPE": answer for kind, answer in rivals.items()}
    figures = []
    for kind in ("median", "fastest"):
        key = f"{kind}_ms"
        figures += against_each(
            f"{case.name}: step, {kind}",
            graphed[key],
            "ms",
            others,
            itemgetter(key),
            floor=None if floor is None else floor[key],
        )
    if floor is not None:
        figures += [
            figure("forward_backward_func wall / floor", floor["wall_over_floor"], "ratio", bar=1.03),
            figure("floor: graphs launched by a bare loop", floor["bare_ms"], "ms"),
            figure("floor: GPU time outside of graphs", floor["outside_ms"], "ms"),
        ]
    figures += _beside_eager(case, ours)
    return [*figures, figure("GPU busy in the traced step", ours["busy_ms"], "ms")]


def _beside_eager(case: StepCase, ours: Answer) -> list[results.Figure]:
    """Ratios of the walls of the same packs, and of all kernels' time.

    The bars stand on eager as users have it, for models that are not small.
    """

    def bar(value: float) -> float | None:
        return None if case.is_small else value

    wall = sum(ours["graphed"]["by_step_ms"])
    figures = [
        results.Figure(
            name=f"{case.name}: wall / that of {rival}",
            value=wall / sum(answer["by_step_ms"]),
            unit="ratio",
            bar=barred,
        )
        for rival, answer, barred in (
            (SAME_PACKS, ours["eager"], None),
            (UNPATCHED, ours["unpatched"], bar(1.0)),
        )
        if "error" not in answer
    ]
    eager = ours["unpatched"].get("kernels_ms")
    if eager is not None:
        kernels = ours["kernels_ms"]
        figures += [
            results.Figure(
                name=f"{case.name}: kernel time of a step / that of {UNPATCHED}",
                value=kernels / eager,
                unit="ratio",
                bar=bar(1.01),
            ),
            results.Figure(
                name=f"{case.name}: kernel time of a step",
                value=kernels,
                unit="ms",
                rival=UNPATCHED,
                rival_value=eager,
            ),
        ]
    return figures


def timeline_figures(rows: Iterable[tuple[str, float, float | None]]) -> list[results.Figure]:
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


def _measure_case(case: StepCase) -> list[results.Figure]:
    ours = measure_part(_MODULE, f"{case.name}/ours", timeout=TIMEOUT_SECONDS)
    if case.name == TIMELINE:
        publish("step_timeline", timeline_figures(ours["timeline"]))
    rivals = {kind: try_part(_MODULE, f"{case.name}/{kind}", timeout=TIMEOUT_SECONDS) for kind in case.rivals}
    return figures_of(case, ours, rivals)


def run() -> None:
    """Measures every case; writes benchmarks/results/step.json and step_timeline.json."""
    measurement = Measurement("step")
    for name, case in CASES.items():
        measurement.take(name, partial(_measure_case, case))
    measurement.publish()


def _measure(part: str) -> None:
    name, _, kind = part.partition("/")
    case = CASES[name]
    quiet_megatron()
    with process_groups():
        if kind == "ours":
            seed_streams()
            print(json.dumps(measure_ours(case)), flush=True)
            return
        steps = case.batches(torch.device("cuda"), canonical=True)
        answer = caught(lambda: spread_ms(measure_rival(case.model, kind, steps)))
        print(json.dumps(answer), flush=True)
        # The group would wait for ever for what a graph of Megatron's holds of it.
        os._exit(0)


if __name__ == "__main__":
    _measure(sys.argv[1])
