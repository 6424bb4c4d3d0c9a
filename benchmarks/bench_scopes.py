# SPDX-License-Identifier: Apache-2.0
"""Experts with more and more of their layers in graphs: whose kernels are inside, time of a step, peaks.

Everything runs on the canonical packs of mode `eager`, which is what it stands beside. Transformer Engine's
layers stand beside Megatron's own graphs of the same parts, too, on unpacked batches of the same tokens. Each
part runs in a process of its own, one after another.
"""

from functools import partial
from statistics import median

from benchmarks.bench_memory import MIB
from benchmarks.measuring.children import Answer, measure_part, try_part
from benchmarks.measuring.figures import Measurement, beside, counts_of_calls, plain, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.bits import LAYER_KINDS
from benchmarks.subjects.hosts import answer_ours, answer_rival
from benchmarks.subjects.scopes import EAGER, PARTS, RIVALS, SCOPES, measure_megatrons, measure_scopes

PEAK_BAR = 1.05
RIVAL = "Megatron's graphs"


def figures_of(name: str, answer: Answer, eager: Answer) -> list[Figure]:
    """What one training came to, beside mode `eager`."""
    wall, its = median(answer["walls_ms"]), median(eager["walls_ms"])
    reserved, its_reserved = answer["reserved"] / MIB, eager["reserved"] / MIB
    is_eager = name.endswith(EAGER)
    rival = {} if is_eager else {"rival": EAGER, "rival_value": its, "bar": its}
    figures = [timed(f"{name}: a step of four micro-batches", answer["walls_ms"], "ms", value=wall, **rival)]
    rival = {} if is_eager else {"rival": EAGER, "rival_value": its_reserved, "bar": PEAK_BAR * its_reserved}
    figures.append(Figure(name=f"{name}: peak memory reserved", value=reserved, unit="MiB", **rival))
    counts: dict[str, tuple[float, str]] = {
        f"kernels of {part}, {where} of graphs": (count, "kernels")
        for part, of_part in answer["kernels"].items()
        for where, count in of_part.items()
    }
    counts["work that graphs launch"] = (100 * answer["graphed_share"], "%")
    counts["host for a layer and micro-batch, profiled, without its waits"] = (answer["host_us"], "us")
    calls = [] if is_eager else counts_of_calls(name, answer["report"])
    return [*figures, *plain(name, counts), *calls]


def beside_megatrons(name: str, answer: Answer) -> list[Figure]:
    """A step beside one with Megatron's graphs of the same parts; none where there are no such graphs."""
    if name not in RIVALS:
        return []
    rival = try_part(__name__, f"{RIVAL}, {RIVALS[name]}")
    bar = None if "error" in rival else median(rival["walls_ms"])
    figure = timed(f"{name}: a step beside unpacked batches", answer["walls_ms"], "ms", bar=bar)
    return [beside(figure, RIVAL, rival, lambda answer: median(answer["walls_ms"]))]


def measure(measurement: Measurement) -> None:
    """Measures each kind of layers, first eager."""

    def measured(layers: str) -> list[Figure]:
        names = [f"{layers}: {scopes}" for scopes in SCOPES]
        answers = {name: measure_part(__name__, name) for name in names}
        eager = answers[f"{layers}: {EAGER}"]
        figures = [figure for name, answer in answers.items() for figure in figures_of(name, answer, eager)]
        for name, answer in answers.items():
            figures += beside_megatrons(name, answer)
        return figures

    for layers in LAYER_KINDS:
        measurement.take(layers, partial(measured, layers))


def answer(name: str) -> None:
    """A training."""
    if name.startswith(RIVAL):
        answer_rival(partial(measure_megatrons, name.partition(", ")[2]))
    else:
        answer_ours(partial(measure_scopes, *PARTS[name]), seeded=True)
