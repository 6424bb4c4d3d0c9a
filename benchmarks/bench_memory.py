# SPDX-License-Identifier: Apache-2.0
"""Memory of graphs: peak against eager's at the same physical tokens, their executables, four capacities.

Each part runs in a process of its own. Eager and graphed steps are padded to the same capacity. Peaks are of
torch's allocator, from the start of the process; no optimizer has made its state, which would hide the
difference. What lies outside the allocator is the device's used memory less that: nothing else may run there.
"""

from functools import partial

from benchmarks.measuring.children import Answer, Parts, measure_part
from benchmarks.measuring.clocks import MIB
from benchmarks.measuring.results import Figure, against, plain
from benchmarks.subjects.steps import NUM_SEQS, StepCase, measure_steps, step_case
from megagraph.decide.dispatch import Capacity

FOUR = "four capacities"
HALVES = ("attn", "mlp")  # of each layer, the other half eager
# By name; what is measured beside eager and graphed steps.
CASES = {
    f"hidden {hidden}, 24 layers, packs of 8192": (step_case(hidden, layers=24, tokens=8192), beside)
    for hidden, beside in {1024: (FOUR, *HALVES), 4096: ()}.items()
}


def measure_memory(case: StepCase, what: str) -> Answer:
    """Memory of a few steps: `eager`, `graphed`, with `FOUR` further capacities, or of one of `HALVES`."""
    tokens = case.tokens
    # One of fewer documents and two of fewer tokens.
    further = ((tokens, 8), (tokens // 2, NUM_SEQS // 2), (tokens // 4, NUM_SEQS // 4))
    smaller = [Capacity(tokens=rows, num_seqs=count, max_seqlen=rows) for rows, count in further]
    return measure_steps(
        case,
        "eager" if what == "eager" else "graphed",
        is_full=False,
        trainer={},
        capacities=(case.capacity, *(smaller if what == FOUR else ())),
        cuda_graph_modules=(what,) if what in HALVES else (),
    )


PARTS: Parts = {
    f"{name}: {what}": partial(measure_memory, case, what)
    for name, (case, beside) in CASES.items()
    for what in ("eager", "graphed", *beside)
}


def _measured(name: str) -> list[Figure]:
    """The figures of one model."""
    parts = ("eager", "graphed", *CASES[name][1])
    answers = {what: measure_part(__name__, f"{name}: {what}") for what in parts}
    graphed, eager = answers["graphed"], answers["eager"]

    def executables(answer: Answer) -> int:
        return int(answer["outside"] - answer["outside_before"])

    def beside(what: str, value: float, rival: str, its: float, share: float | None = None) -> Figure:
        return against(f"{name}: {what}", value / MIB, rival, its / MIB, share=share)

    same, peak = "eager, the same physical tokens", "peak memory reserved"
    outside, pools = "executables, outside the allocator", "pools of the graphs"
    whole = "device memory in all, executables and CUDA's own included"
    report, in_all = graphed["report"], graphed["reserved"] + graphed["outside"]
    values = {
        "graphs": (report["graphs"], "graphs"),
        outside: (executables(graphed) / MIB, "MiB"),
        "executables, for each graph": (executables(graphed) / report["graphs"] / 1024, "KiB"),
        pools: (report["pool_bytes"] / MIB, "MiB"),
    }
    figures = [
        beside(peak, graphed["reserved"], same, eager["reserved"], 1.05),
        beside(whole, in_all, same, eager["reserved"] + graphed["outside_before"]),
        *plain(name, values),
    ]
    if FOUR in answers:
        four, one = answers[FOUR], "the largest capacity alone"
        figures += [
            beside(f"{FOUR}, {peak}", four["reserved"], one, graphed["reserved"], 1.10),
            beside(f"{FOUR}, {pools}", four["report"]["pool_bytes"], one, report["pool_bytes"], 1.10),
            beside(f"{FOUR}, {outside}", executables(four), one, executables(graphed)),
        ]
    figures += [
        beside(f"{part} alone, {peak}", answers[part]["reserved"], same, eager["reserved"], 1.05)
        for part in HALVES
        if part in answers
    ]
    return figures


FIGURES = {name: partial(_measured, name) for name in CASES}
