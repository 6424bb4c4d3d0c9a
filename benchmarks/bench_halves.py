# SPDX-License-Identifier: Apache-2.0
"""Attention, MLP, or both of dense layers in graphs: bits, calls, where the kernels run, and peaks.

Bits are those of a training that knows nothing of the plugin, as in `bits`. Peaks are those of `memory`,
of the halves alone. Each part runs in a process of its own.
"""

from collections.abc import Mapping
from functools import partial

from benchmarks.bench_bits import ENVIRONMENT
from benchmarks.bench_memory import CASES, MIB, PARTS
from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.figures import Measurement, counts_of_calls, plain
from benchmarks.measuring.results import Figure
from benchmarks.subjects.bits import measure_bits
from benchmarks.subjects.halves import BITS, PROFILED, PROFILED_CASE, STEPS, measure_kernels
from benchmarks.subjects.hosts import answer_ours

TIMEOUT_SECONDS = 400
PEAK_CASE = next(iter(CASES))
PEAK_BAR = 1.05


def bits_figures(name: str, answer: Answer) -> list[Figure]:
    """What differs from the unpatched run, and the calls."""
    graph, figures = answer["graph"], []
    for what in ("losses", "gradients"):
        title = f"{name}: {what} of {STEPS} steps that differ from an unpatched run's"
        figures.append(Figure(name=title, value=graph[what], unit=f"of {answer[what]}", bar=0))
    return [*figures, *counts_of_calls(name, graph["report"])]


def kernel_figures(name: str, answer: Answer) -> list[Figure]:
    """Kernels of each half, inside of graphs and outside."""
    counts = {
        f"{half}, {where} of graphs": (count, "kernels")
        for half, of_half in answer.items()
        for where, count in of_half.items()
    }
    return plain(name, counts)


def peak_figures(answers: Mapping[str, Answer]) -> list[Figure]:
    """The peak of each half beside that of eager."""
    eager = answers["eager"]["reserved"] / MIB
    return [
        Figure(
            name=f"{PEAK_CASE}: {part} alone, peak memory reserved",
            value=answers[part]["reserved"] / MIB,
            unit="MiB",
            bar=PEAK_BAR * eager,
            rival="eager, the same physical tokens",
            rival_value=eager,
        )
        for part in PARTS
    ]


def measure(measurement: Measurement) -> None:
    """Measures bits, kernels and peaks."""

    def ask(part: str) -> Answer:
        # Only bits ask for determinism, for which Transformer Engine takes kernels that others have, too.
        environment = ENVIRONMENT if part in BITS else None
        return measure_part(__name__, part, timeout=TIMEOUT_SECONDS, environment=environment)

    parts = {**dict.fromkeys(BITS, bits_figures), **dict.fromkeys(PROFILED, kernel_figures)}
    measurement.take_side_by_side(parts, ask)
    memory = partial(measure_part, "benchmarks.bench_memory", PEAK_CASE)
    measurement.take("peaks", lambda: peak_figures({what: memory(what) for what in ("eager", *PARTS)}))


def answer(name: str) -> None:
    """A training, or the kernels of a step."""
    import torch

    if name in BITS:
        torch.use_deterministic_algorithms(True)
        answer_ours(partial(measure_bits, BITS[name], steps=STEPS))
    else:
        answer_ours(partial(measure_kernels, *PROFILED[name], PROFILED_CASE), seeded=True)
