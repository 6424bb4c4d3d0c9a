# SPDX-License-Identifier: Apache-2.0
"""A graph for each layer, or one for all neighbouring layers: what fewer graphs gain, and what they cost.

One step is limited by the host, one by the GPU. Every way to run a step has the same packs, in a process of
its own; eager is with the plugin, graphs disabled. Beside ours Megatron's own graphs of layers (`local`), on
packs of one shape, with our RoPE.
"""

from collections.abc import Mapping
from functools import partial
from statistics import median

from benchmarks.measuring.children import Answer, measure_part, try_part
from benchmarks.measuring.figures import Measurement, beside, plain, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.chunks import measure_granularity
from benchmarks.subjects.hosts import answer_ours, answer_rival
from benchmarks.subjects.steps import RIVALS, StepCase, measure_rival, step_case

MIB = 2**20
LOCAL = "local"
GRANULARITIES = ("layer", "chunk")
CASES = {
    "limited by the host, hidden 512, 24 layers, packs of 2048": step_case(512, layers=24, tokens=2048),
    "limited by the GPU, hidden 4096, 4 layers, packs of 8192": step_case(4096, layers=4, tokens=8192),
}


def _figures_of(name: str, answers: Mapping[str, Answer], local: Answer) -> list[Figure]:
    figures: list[Figure] = []
    layer = answers["layer"]
    for granularity, found in answers.items():
        title = f"{name}, {granularity}"
        step = timed(f"{title}: a step, median", found["graphed"], "ms")
        figures += [
            beside(
                step, f"Megatron's {LOCAL} graphs, canonical packs", local, lambda its: median(its["walls"])
            ),
            timed(f"{title}: a step eager, median", found["eager"], "ms"),
            timed(
                f"{title}: host time of a step, median",
                found["host"],
                "us",
                rival="a graph for each layer",
                rival_value=median(layer["host"]),
            ),
        ]
        values = {
            "launches of graphs in a micro-batch": (found["launches"], "launches"),
            "graphs": (found["graphs"], "graphs"),
            "pools of the graphs": (found["pools"] / MIB, "MiB"),
            "executables, outside the allocator": (found["executables"] / MIB, "MiB"),
            "peak memory reserved": (found["reserved"] / MIB, "MiB"),
            "capture": (found["capture_seconds"], "s"),
        }
        figures += plain(title, values)
    return figures


def measure(measurement: Measurement) -> None:
    """Measures every case."""

    def measured(name: str) -> list[Figure]:
        answers = {kind: measure_part(__name__, name, kind) for kind in GRANULARITIES}
        return _figures_of(name, answers, try_part(__name__, name, LOCAL))

    for name in CASES:
        measurement.take(name, partial(measured, name))


def answer(name: str, kind: str) -> None:
    """Ours of a case, or Megatron's graphs of it."""
    case: StepCase = CASES[name]
    if kind == LOCAL:
        assert LOCAL in RIVALS
        answer_rival(partial(measure_rival, case, LOCAL))
    else:
        answer_ours(partial(measure_granularity, case, kind), seeded=True)
