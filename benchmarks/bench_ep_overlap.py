# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel overlap in one process: steps without it, under it eager, and under it with graphs.

A copy stands for the all-to-all, "the stand-in": it takes a set time on the communication stream, and hardly
any of the device's bandwidth. So this tells what overlap costs the host and what can lie under compute, and
nothing of a network. All layers are of experts and of Transformer Engine's modules; each way to run them has
a process of its own. Host times are those until the schedule returns, without the host's waits for events.
Peaks are those of the whole process, and those of steps after the capture, which training goes on with.
"""

from functools import partial
from statistics import median
from typing import Any

from benchmarks.measuring.children import measure_part, parts_of
from benchmarks.measuring.clocks import MIB
from benchmarks.measuring.results import Figure, against, plain, timed
from benchmarks.subjects.overlap import ALLOCATED, EAGER, GRAPHED, MEMORY, POOLS, WITHOUT, measure_overlap
from benchmarks.subjects.steps import step_case

WAYS = (WITHOUT, EAGER, GRAPHED)
TIMES_US = (0, 50, 200, 800)
SCOPES = ("attn", "moe_router", "moe_preprocess")
HOST_BAR, PEAK_BAR = 0.6, 1.05  # of eager overlap
CASES = {
    "limited by the host, hidden 512, 8 layers, packs of 1024": step_case(512, layers=8, tokens=1024),
    "hidden 2048, 4 layers, packs of 16384": step_case(2048, layers=4, tokens=16384),
}
HOW: dict[str, Any] = {"is_engine": True, "times_us": TIMES_US, "scopes": SCOPES}
PARTS = parts_of(partial(measure_overlap, **HOW), CASES, WAYS)


def _figures_of(name: str) -> list[Figure]:
    answers = {way: measure_part(__name__, f"{name}: {way}") for way in WAYS}
    figures: list[Figure] = []
    for place, us in enumerate(TIMES_US):
        title = f"{name}, the stand-in takes {us} us"
        walls = {way: answer["walls"][place] for way, answer in answers.items()}
        host = {way: answer["host_us"][place] for way, answer in answers.items()}
        best = min((WITHOUT, EAGER), key=lambda way: median(walls[way]))
        its = {"rival": best, "rival_value": median(walls[best]), "bar": median(walls[best])}
        beside = {"rival": EAGER, "rival_value": median(host[EAGER]), "bar": HOST_BAR * median(host[EAGER])}
        for way, answer in answers.items():
            own, on_host = (its, beside) if way == GRAPHED else ({}, {})
            where = f"{title}, {way}"
            figures.append(timed(f"{where}: a step, median", walls[way], "ms", **own))
            figures.append(timed(f"{where}: host time of a micro-batch", host[way], "us", **on_host))
            values = {"launches of a micro-batch": (answer["launches"][place], "launches")}
            if us:
                values["what of the stand-in's time lies under compute"] = answer["share"][place], "share"
            figures += plain(where, values)
    memory = {way: answer["memory"] for way, answer in answers.items()}
    for what in MEMORY[:-1]:
        peaks = {way: of[what] / MIB for way, of in memory.items()}
        bar, where = None if what == ALLOCATED else PEAK_BAR, f"{name}: {what}"
        figures += plain(where, {way: (peaks[way], "MiB") for way in (WITHOUT, EAGER)})
        figures.append(against(f"{where}: {GRAPHED}", peaks[GRAPHED], EAGER, peaks[EAGER], share=bar))
    return [*figures, *plain(name, {POOLS: (memory[GRAPHED][POOLS] / MIB, "MiB")})]


FIGURES = {name: partial(_figures_of, name) for name in CASES}
