# SPDX-License-Identifier: Apache-2.0
"""More or less of a model in graphs: experts with more and more of their layers, and all layers in one graph.

Experts stand beside mode `eager`, on whose canonical packs everything runs. Graphs of all neighbouring layers
stand beside a graph for each layer and beside eager, graphs disabled, in a step that the host limits. Each
part runs in a process of its own.
"""

from functools import partial
from typing import Any

from benchmarks.measuring.children import Parts, measure_part
from benchmarks.measuring.results import Figure, against, in_mib, timed
from benchmarks.subjects.packs import LAYER_KINDS
from benchmarks.subjects.steps import measure_steps, step_case

EAGER = "mode eager"
MODULES = ("attn", "moe_router", "moe_preprocess")
# Options of the plugin.
SCOPES: dict[str, dict[str, Any]] = {
    EAGER: {"mode": "eager"},
    **{", ".join(MODULES[:count]): {"cuda_graph_modules": MODULES[:count]} for count in (1, 2, 3)},
}
PEAK_BAR, ROUNDS, HOST_LIMITED_ROUNDS = 1.05, 3, 10
CASE = step_case(1024, layers=8, tokens=4096)
GRANULARITIES = ("layer", "chunk")
HOST_LIMITED = step_case(512, layers=24, tokens=2048)
HOST_LIMITED_NAME = "limited by the host, hidden 512, 24 layers, packs of 2048"


of_experts = partial(measure_steps, CASE, rounds=ROUNDS)
joined = partial(measure_steps, HOST_LIMITED, rounds=HOST_LIMITED_ROUNDS, beside=True)
# In turns with eager: hosts are faster in one minute than in another.
PARTS: Parts = {
    **{
        f"{kind}: {scopes}": partial(of_experts, experts_of_engine=is_engine, **how)
        for kind, is_engine in LAYER_KINDS.items()
        for scopes, how in SCOPES.items()
    },
    **{f"{HOST_LIMITED_NAME}, {it}": partial(joined, cuda_graph_granularity=it) for it in GRANULARITIES},
}


def _layer_figures(kind: str) -> list[Figure]:
    answers = {scopes: measure_part(__name__, f"{kind}: {scopes}") for scopes in SCOPES}
    eager, figures = answers[EAGER], list[Figure]()
    for scopes, answer in answers.items():
        step = timed(f"{kind}: {scopes}: a step of four micro-batches", answer["graphed"], "ms")
        peak = in_mib(f"{kind}: {scopes}: peak memory reserved", answer["reserved"])
        if scopes != EAGER:
            step = against(step, EAGER, answer["eager"], share=1)
            peak = against(peak, EAGER, eager["reserved"], share=PEAK_BAR)
        figures += [step, peak]
    return figures


def _granularity_figures() -> list[Figure]:
    figures = []
    for granularity in GRANULARITIES:
        title = f"{HOST_LIMITED_NAME}, {granularity}"
        found = measure_part(__name__, title)
        steps = {"a step": "graphed", "a step eager": "eager"}
        figures += [timed(f"{title}: {what}, median", found[of], "ms") for what, of in steps.items()]
        figures.append(in_mib(f"{title}: peak memory reserved", found["reserved"]))
    return figures


FIGURES = {
    **{kind: partial(_layer_figures, kind) for kind in LAYER_KINDS},
    HOST_LIMITED_NAME: _granularity_figures,
}
