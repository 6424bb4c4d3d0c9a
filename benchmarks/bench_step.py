# SPDX-License-Identifier: Apache-2.0
"""Whole training steps on packs: the wall of `forward_backward_func`, its floor, eager and Megatron's graphs.

The floor of a step is its own graphs launched back to back by a loop in C, plus the GPU time of what runs
outside of graphs. Each case runs in a process of its own. Models are built on a side stream, as Megatron-LM
does, so that eager adds gradients beside its backward pass. No deterministic algorithms; Python's cyclic
garbage waits while steps are timed. Every way to run a step has the same packs, which are full. Eager is
measured twice: with the plugin, graphs disabled, which pads packs to their capacity; and without it, on packs
as they come, with our attention and RoPE, which Megatron's local layers need.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from statistics import median

from benchmarks.measuring.children import Parts, measure_part, try_part
from benchmarks.measuring.results import Figure, beside_each, ratios, timed
from benchmarks.subjects.steps import StepCase, measure_ours, measure_rival, step_case

SAME_PACKS = "eager with the plugin, graphs disabled"
UNPATCHED = "unpatched eager, packs as they come, our attention and RoPE"
RIVALS = {"local": "Megatron's local graphs", "full_iteration": "Megatron's full iteration graph"}
CASES = (
    step_case(512, layers=24, tokens=2048),
    step_case(1024, layers=24, tokens=4096),
    step_case(1024, layers=24, tokens=8192),
    step_case(2048, layers=8, tokens=16384),
    step_case(4096, layers=4, tokens=8192),
)
RIVALS_CASE = CASES[1]
PARTS: Parts = {
    **{f"{case.name}: ours": partial(measure_ours, case) for case in CASES},
    **{kind: partial(measure_rival, RIVALS_CASE, kind) for kind in RIVALS},
}


def by_step(walls: Sequence[float], distinct: int) -> list[float]:
    """The median wall of each distinct step: steps of different packs are not one median."""
    return [median(walls[step::distinct]) for step in range(distinct)]


def _figures_of(case: StepCase) -> list[Figure]:
    ours = measure_part(__name__, f"{case.name}: ours")
    rivals = {kind: try_part(__name__, kind) for kind in RIVALS} if case is RIVALS_CASE else {}
    graphed, unpatched = ours["graphed"], ours["unpatched"]
    # Of a small model; each floor is of its own round and its own packs.
    pairs = zip(ours["bare"] if case.is_small else (), itertools.cycle(ours["outside_ms"]), strict=False)
    floors = [launched + outside for launched, outside in pairs]
    others = {SAME_PACKS: {"walls": ours["eager"]}, UNPATCHED: unpatched}
    others |= {f"{RIVALS[kind]}, canonical packs, our RoPE": answer for kind, answer in rivals.items()}
    middle = timed(f"{case.name}: step, median", graphed, "ms", floor=median(floors) if floors else None)
    figures = beside_each(middle, others, "walls")
    if floors:
        over = ratios(graphed, floors)
        figures.append(timed(f"{case.name}: forward_backward_func wall / floor", over, "ratio", bar=1.03))
    if "error" in unpatched:
        return figures
    # Of the same packs. The bars stand on models that are not small.
    mine, theirs = (by_step(each, case.distinct_steps) for each in (graphed, unpatched["walls"]))
    wall_bar, kernel_bar = (None, None) if case.is_small else (1.0, 1.01)
    kernels, its = ours["kernels_ms"], unpatched["kernels_ms"]
    name, wall = f"{case.name}: kernel time of a step", f"{case.name}: wall / that of {UNPATCHED}"
    over = [of_ours / of_step for of_ours, of_step in zip(graphed, itertools.cycle(theirs), strict=False)]
    return [
        *figures,
        timed(wall, over, "ratio", value=sum(mine) / sum(theirs), bar=wall_bar),
        Figure(name=f"{name} / that of {UNPATCHED}", value=kernels / its, unit="ratio", bar=kernel_bar),
        Figure(name=name, value=kernels, unit="ms", rival=UNPATCHED, rival_value=its),
    ]


FIGURES = {case.name: partial(_figures_of, case) for case in CASES}
