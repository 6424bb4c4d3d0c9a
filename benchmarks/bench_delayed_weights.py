# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel overlap that makes gradients of weights later, beside what makes them at once.

As `bench_ep_overlap.py` has it: a stand-in that takes a set time, Transformer Engine's modules, a process for
each way. Matrix products are the kernels of a profiled step that are called so. The nodes of two layers, one
forward beside the other's backward, lie in the middle of that step, each from its first kernel to its last.
"""

from functools import partial

from benchmarks.bench_ep_overlap import CASES, HOW, TIMES_US, peaks_of, times_of
from benchmarks.measuring.children import Parts, measure_part
from benchmarks.measuring.results import Figure, against
from benchmarks.subjects.overlap import EAGER, GRAPHED, measure_overlap

*_, (NAME, CASE) = CASES.items()
ACCUMULATIONS = {"added to main_grad by the products": True, "added by themselves": False}
AT_ONCE, LATER, LATER_EAGER = "graphed, at once", "graphed, delayed", "eager, delayed"
WAYS = {AT_ONCE: (GRAPHED, False), LATER: (GRAPHED, True), LATER_EAGER: (EAGER, True)}
TIMELINE = f"{NAME}, with the stand-in, {LATER}: a layer's nodes beside another's"  # ms since the first one
PARTS: Parts = {
    f"{added}: {name}": partial(measure_overlap, CASE, way, **HOW, delays=delays, is_fused=is_fused)
    for added, is_fused in ACCUMULATIONS.items()
    for name, (way, delays) in WAYS.items()
}


def _figures_of(added: str) -> list[Figure]:
    answers = {way: measure_part(__name__, f"{added}: {way}") for way in WAYS}
    figures: list[Figure] = []
    for place, us in enumerate(TIMES_US):
        title = f"{NAME}, the stand-in takes {us} us, gradients {added}"
        figures += times_of(title, answers, place, ours=LATER, eager=LATER_EAGER, best=LATER_EAGER)
        for way, answer in answers.items():
            name, count = f"{title}, {way}: matrix products of a step", answer["products"][place]
            products = Figure(name=name, value=count, unit="products")
            if way != AT_ONCE:
                products = against(products, AT_ONCE, answers[AT_ONCE]["products"][place], share=1)
            figures.append(products)
    figures += peaks_of(f"{NAME}, with the stand-in, gradients {added}", answers, LATER, LATER_EAGER)
    for node, times in answers[LATER]["nodes"].items() if ACCUMULATIONS[added] else ():
        for what, us in zip(("begins", "ends"), times, strict=True):
            figures.append(Figure(name=f"{TIMELINE}, {node}: {what}", value=us / 1e3, unit="ms"))
    return figures


FIGURES = {added: partial(_figures_of, added) for added in ACCUMULATIONS}
