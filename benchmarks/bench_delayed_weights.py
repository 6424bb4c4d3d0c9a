# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel overlap that makes gradients of weights later, beside what makes them at once.

As `bench_ep_overlap.py` has it: a stand-in that takes a set time, Transformer Engine's modules, a process for
each way. Matrix products are the kernels of a profiled step that are called so. The nodes of two layers, one
forward beside the other's backward, lie in the middle of that step, each from its first kernel to its last.
"""

from functools import partial
from statistics import median
from typing import Any

from benchmarks.bench_ep_overlap import CASES, HOST_BAR, HOW, PEAK_BAR
from benchmarks.measuring.children import Parts, measure_part
from benchmarks.measuring.clocks import MIB
from benchmarks.measuring.results import Figure, against, plain, timed
from benchmarks.subjects.overlap import EAGER, GRAPHED, RESERVED, RESERVED_LATER, measure_overlap

*_, (NAME, CASE) = CASES.items()
TIME_US = 800
ACCUMULATIONS = {"added to main_grad by the products": True, "added by themselves": False}
AT_ONCE, LATER, LATER_EAGER = "graphed, at once", "graphed, delayed", "eager, delayed"
WAYS = {AT_ONCE: (GRAPHED, False), LATER: (GRAPHED, True), LATER_EAGER: (EAGER, True)}
TIMELINE = f"{NAME}, {LATER}: a layer's nodes beside another's"  # in ms from the first one on
PARTS: Parts = {
    f"{added}: {name}": partial(
        measure_overlap, CASE, way, **{**HOW, "times_us": (TIME_US,), "delays": delays, "is_fused": is_fused}
    )
    for added, is_fused in ACCUMULATIONS.items()
    for name, (way, delays) in WAYS.items()
}


def _figures_of(added: str) -> list[Figure]:
    answers = {way: measure_part(__name__, f"{added}: {way}") for way in WAYS}
    title = f"{NAME}, the stand-in takes {TIME_US} us, gradients {added}"
    steps, host = ({way: answer[of][0] for way, answer in answers.items()} for of in ("walls", "host_us"))
    products = {way: answer["products"][0] for way, answer in answers.items()}
    step, on_host, rival = median(steps[LATER_EAGER]), median(host[LATER_EAGER]), {"rival": LATER_EAGER}
    beside = {**rival, "rival_value": step, "bar": step}
    beside_host = {**rival, "rival_value": on_host, "bar": HOST_BAR * on_host}
    figures: list[Figure] = []
    for way in WAYS:
        where, most = f"{title}, {way}", products[AT_ONCE]
        its, of_host = (beside, beside_host) if way == LATER else ({}, {})
        figures.append(timed(f"{where}: a step, median", steps[way], "ms", **its))
        figures.append(timed(f"{where}: host time of a micro-batch", host[way], "us", **of_host))
        made: dict[str, Any] = {"name": f"{where}: matrix products of a step", "value": products[way]}
        as_many = {"rival": AT_ONCE, "rival_value": most, "bar": most} if way != AT_ONCE else {}
        figures.append(Figure(**made, unit="products", **as_many))
    for what in (RESERVED, RESERVED_LATER):
        peaks = {way: answer["memory"][what] / MIB for way, answer in answers.items()}
        figures += plain(f"{title}: {what}", {way: (peaks[way], "MiB") for way in (AT_ONCE, LATER_EAGER)})
        name = f"{title}: {what}: {LATER}"
        figures.append(against(name, peaks[LATER], LATER_EAGER, peaks[LATER_EAGER], share=PEAK_BAR))
    for node, times in answers[LATER]["nodes"].items() if ACCUMULATIONS[added] else ():
        when = zip(("begins", "ends"), times, strict=True)
        figures += plain(f"{TIMELINE}, {node}", {what: (us / 1e3, "ms") for what, us in when})
    return figures


FIGURES = {added: partial(_figures_of, added) for added in ACCUMULATIONS}
