# SPDX-License-Identifier: Apache-2.0
"""Experts with more and more of their layers in graphs: whose kernels are inside, time of a step, peaks.

Everything runs on the canonical packs of mode `eager`, which is what it stands beside. Each part runs in a
process of its own, one after another.
"""

from functools import partial
from statistics import median

from benchmarks.bench_memory import MIB
from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.figures import Measurement, counts_of_calls, plain, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import answer_ours
from benchmarks.subjects.right import LAYER_KINDS
from benchmarks.subjects.scopes import EAGER, PARTS, SCOPES, measure_scopes

PEAK_BAR = 1.05


def figures_of(name: str, answer: Answer, eager: Answer) -> list[Figure]:
    """What one training came to, beside mode `eager`."""
    wall, its = median(answer["walls_ms"]), median(eager["walls_ms"])
    reserved, its_reserved = answer["reserved"] / MIB, eager["reserved"] / MIB
    is_eager = answer is eager
    rival = {} if is_eager else {"rival": EAGER, "rival_value": its, "bar": its}
    figures = [timed(f"{name}: a step of four micro-batches", answer["walls_ms"], "ms", value=wall, **rival)]
    rival = {} if is_eager else {"rival": EAGER, "rival_value": its_reserved, "bar": PEAK_BAR * its_reserved}
    figures.append(Figure(name=f"{name}: peak memory reserved", value=reserved, unit="MiB", **rival))
    counts = {
        f"kernels of {part}, {where} of graphs": (count, "kernels")
        for part, of_part in answer["kernels"].items()
        for where, count in of_part.items()
    }
    calls = [] if is_eager else counts_of_calls(name, answer["report"])
    return [*figures, *plain(name, counts), *calls]


def measure(measurement: Measurement) -> None:
    """Measures each kind of layers, first eager."""

    def measured(layers: str) -> list[Figure]:
        answers = {f"{layers}: {scopes}": measure_part(__name__, f"{layers}: {scopes}") for scopes in SCOPES}
        eager = answers[f"{layers}: {EAGER}"]
        return [figure for name, answer in answers.items() for figure in figures_of(name, answer, eager)]

    for layers in LAYER_KINDS:
        measurement.take(layers, partial(measured, layers))


def answer(name: str) -> None:
    """A training."""
    answer_ours(partial(measure_scopes, *PARTS[name]), seeded=True)
