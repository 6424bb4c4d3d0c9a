# SPDX-License-Identifier: Apache-2.0
"""Layers of grouped experts beside Megatron's with Transformer Engine's grouped experts and `SequentialMLP`.

Each kind runs in a process of its own. Walls are of a forward and a backward pass until the device is done;
kernels are all that the profiler saw on the device, without gaps.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median

from benchmarks.measuring.children import Answer, measure_part, try_part
from benchmarks.measuring.figures import Measurement, beside, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.experts import KINDS, ExpertCase, measure_kind, measure_roundings
from benchmarks.subjects.hosts import answer_ours, answer_rival

TIMEOUT_SECONDS = 240
OURS, ROUNDINGS = "grouped", "roundings"
RIVALS = tuple(kind for kind in KINDS if kind != OURS)
# Of the time of Transformer Engine's, the first of the rivals; and of the norm of what `SequentialMLP` gives.
BAR, ROUNDINGS_BAR = 1.3, 1e-2
CASES = {
    case.name: case
    for case in (
        ExpertCase(tokens=4096, hidden=2048, inner=1408, experts=64, topk=6),
        ExpertCase(tokens=16384, hidden=2048, inner=1408, experts=64, topk=6),
        ExpertCase(tokens=8192, hidden=4096, inner=2048, experts=64, topk=8),
    )
}


def _wall(answer: Answer) -> float:
    return float(median(answer["walls"]))


def _kernels(answer: Answer) -> float:
    return float(answer["kernels"])


def figures_of(name: str, ours: Answer, rivals: Sequence[Answer]) -> list[Figure]:
    """The figures of one case; bars stand beside the first rival."""
    figures: list[Figure] = []
    walls = {"in a graph": ours, "eager": ours["eager"]}
    for rival, answer in zip(RIVALS, rivals, strict=True):
        has_bar = rival == RIVALS[0] and "error" not in answer
        for how, mine in walls.items():
            bar = BAR * _wall(answer) if has_bar and how == "in a graph" else None
            wall = timed(f"{name}: forward and backward, {how}, median", mine["walls"], "ms", bar=bar)
            figures.append(beside(wall, rival, answer, _wall))
        bar = BAR * _kernels(answer) if has_bar else None
        kernels = Figure(name=f"{name}: kernels", value=_kernels(ours), unit="ms", bar=bar)
        figures.append(beside(kernels, rival, answer, _kernels))
    copies = Figure(
        name=f"{name}: copies to the host in 10 passes", value=ours["copies"], unit="copies", bar=0
    )
    copies = beside(copies, RIVALS[0], rivals[0], lambda answer: float(answer["copies"]))
    same = Figure(
        name=f"{name}: bits that differ from eager", value=float(not ours["same"]), unit="passes", bar=0
    )
    return [*figures, copies, same]


def _roundings(name: str) -> list[Figure]:
    told = f"{name}: difference from SequentialMLP / norm"
    answer = measure_part(__name__, name, ROUNDINGS, timeout=TIMEOUT_SECONDS)
    return [
        Figure(name=f"{told}, {what}", value=value, unit="ratio", bar=ROUNDINGS_BAR)
        for what, value in answer.items()
    ]


def measure(measurement: Measurement) -> None:
    """Measures every case."""

    def measured(name: str) -> list[Figure]:
        ours = measure_part(__name__, name, OURS, timeout=TIMEOUT_SECONDS)
        rivals = [try_part(__name__, name, kind, timeout=TIMEOUT_SECONDS) for kind in RIVALS]
        return figures_of(name, ours, rivals)

    for name in CASES:
        measurement.take(name, partial(measured, name))
        measurement.take(f"{name}, {ROUNDINGS}", partial(_roundings, name))


def answer(name: str, kind: str) -> None:
    """A kind of layer, or the roundings of grouped ones."""
    case = CASES[name]
    if kind == OURS:
        answer_ours(partial(measure_kind, case, kind), seeded=True)
    elif kind == ROUNDINGS:
        answer_ours(partial(measure_roundings, case), seeded=True)
    else:
        answer_rival(partial(measure_kind, case, kind))
