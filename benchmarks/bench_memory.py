# SPDX-License-Identifier: Apache-2.0
"""Memory of graphs: peak against eager's at the same physical tokens, also of four capacities and of halves.

Each part runs in a process of its own. Eager and graphed steps are padded to the same capacity. Peaks are of
torch's allocator, from the start of the process; no optimizer has made its state, which would hide the
difference.
"""

from functools import partial

from benchmarks.measuring.children import Answer, Parts, measure_part
from benchmarks.measuring.results import Figure, against, in_mib
from benchmarks.subjects.steps import NUM_SEQS, StepCase, measure_steps, step_case
from megagraph._C import Capacity

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
    peaks = {what: answer["reserved"] for what, answer in answers.items()}

    def beside(what: str, num_bytes: int, rival: str, its: int, share: float) -> Figure:
        return against(in_mib(f"{name}: {what}", num_bytes), rival, its, share=share)

    same, peak = "eager, the same physical tokens", "peak memory reserved"
    figures = [beside(peak, peaks["graphed"], same, peaks["eager"], 1.05)]
    if FOUR in answers:
        one = "the largest capacity alone"
        pools, its = (answers[what]["report"]["pool_bytes"] for what in (FOUR, "graphed"))
        figures.append(beside(f"{FOUR}, {peak}", peaks[FOUR], one, peaks["graphed"], 1.10))
        figures.append(beside(f"{FOUR}, pools of the graphs", pools, one, its, 1.10))
    for part in HALVES:
        if part in answers:
            figures.append(beside(f"{part} alone, {peak}", peaks[part], same, peaks["eager"], 1.05))
    return figures


FIGURES = {name: partial(_measured, name) for name in CASES}
