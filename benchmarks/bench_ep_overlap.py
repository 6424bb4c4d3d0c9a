# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel overlap in one process: steps without it, under it eager, and under it with graphs.

A copy stands for the all-to-all, "the stand-in": it takes a set time on the communication stream, and hardly
any of the device's bandwidth. So this tells what overlap costs the host and what can lie under compute, and
nothing of a network. All layers are of experts and of Transformer Engine's modules; each way to run them has
a process of its own. Host times are those until the schedule returns, without the host's waits for events.
Peaks are those of the whole process, and of steps after the capture, which training goes on with; also of a
deeper model, as all layers share what is temporary in graphs.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks.measuring.children import Answer, measure_part, parts_of
from benchmarks.measuring.results import Figure, against, in_mib, timed
from benchmarks.subjects.overlap import EAGER, GRAPHED, MEMORY, WITHOUT, measure_overlap
from benchmarks.subjects.steps import step_case

WAYS = (WITHOUT, EAGER, GRAPHED)
TIMES_US = (0, 50, 200, 800)
SCOPES = ("attn", "moe_router", "moe_preprocess")
HOST_BAR, PEAK_BAR = 0.6, 1.05  # of eager overlap
CASES = {
    "limited by the host, hidden 512, 8 layers, packs of 1024": step_case(512, layers=8, tokens=1024),
    "hidden 2048, 4 layers, packs of 16384": step_case(2048, layers=4, tokens=16384),
}
DEEP = {"hidden 2048, 16 layers, packs of 8192": step_case(2048, layers=16, tokens=8192)}
HOW: dict[str, Any] = {"is_engine": True, "times_us": TIMES_US, "scopes": SCOPES}
PARTS = {
    **parts_of(partial(measure_overlap, **HOW), CASES, WAYS),
    **parts_of(partial(measure_overlap, **{**HOW, "times_us": (0,)}), DEEP, WAYS[1:]),
}


def _figures_of(name: str, ways: Sequence[str] = WAYS, times_us: Sequence[int] = TIMES_US) -> list[Figure]:
    answers = {way: measure_part(__name__, f"{name}: {way}") for way in ways}
    figures: list[Figure] = []
    for place, us in enumerate(times_us):
        title = f"{name}, the stand-in takes {us} us"
        best = min((WITHOUT, EAGER), key=lambda way: median(answers[way]["walls"][place]))
        figures += times_of(title, answers, place, ours=GRAPHED, eager=EAGER, best=best)
        for way, answer in answers.items():
            made, launches = f"{title}, {way}: launches of a micro-batch", answer["launches"][place]
            figures.append(Figure(name=made, value=launches, unit="launches"))
            if us:
                under = f"{title}, {way}: what of the stand-in's time lies under compute"
                figures.append(Figure(name=under, value=answer["share"][place], unit="share"))
    return figures + peaks_of(f"{name}, with the stand-in", answers, GRAPHED, EAGER)


def times_of(
    title: str, answers: dict[str, Answer], place: int, *, ours: str, eager: str, best: str
) -> list[Figure]:
    """Steps, and times of the host, of every way to run a model, of which ours has bars."""
    figures: list[Figure] = []
    for way, answer in answers.items():
        step = timed(f"{title}, {way}: a step, median", answer["walls"][place], "ms")
        on_host = timed(f"{title}, {way}: host time of a micro-batch", answer["host_us"][place], "us")
        if way == ours:
            step = against(step, best, answers[best]["walls"][place], share=1)
            on_host = against(on_host, eager, answers[eager]["host_us"][place], share=HOST_BAR)
        figures += [step, on_host]
    return figures


def peaks_of(title: str, answers: dict[str, Answer], ours: str, rival: str) -> list[Figure]:
    """Peaks of every way to run a model, of which ours has a bar."""
    figures: list[Figure] = []
    for what in MEMORY:
        peaks = {way: in_mib(f"{title}: {what}: {way}", of["memory"][what]) for way, of in answers.items()}
        peaks[ours] = against(peaks[ours], rival, answers[rival]["memory"][what], share=PEAK_BAR)
        figures += peaks.values()
    return figures


FIGURES = {
    **{name: partial(_figures_of, name) for name in CASES},
    **{name: partial(_figures_of, name, WAYS[1:], ()) for name in DEEP},
}
