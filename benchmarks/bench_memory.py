# SPDX-License-Identifier: Apache-2.0
"""Memory of graphs: peak against eager's at the same physical tokens, also of four capacities and of halves.

Each part runs in a process of its own. Eager and graphed steps are padded to the same capacity. Peaks are of
torch's allocator, from the start of the process; no optimizer has made its state, which would hide the
difference.
"""

from functools import partial
from typing import Any

from benchmarks.measuring.children import Parts, measure_part
from benchmarks.measuring.results import Figure, against, in_mib
from benchmarks.subjects.steps import NUM_SEQS, measure_steps, step_case
from megagraph._C import Capacity

FOUR = "four capacities"
HALVES = ("attn", "mlp")  # of each layer, the other half eager
TOKENS = 8192
# One of fewer documents and two of fewer tokens.
ROWS = ((TOKENS, NUM_SEQS), (TOKENS, 8), (TOKENS // 2, NUM_SEQS // 2), (TOKENS // 4, NUM_SEQS // 4))
# Options of the plugin.
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphed": {},
    FOUR: {"capacities": tuple(Capacity(tokens=it, num_seqs=most, max_seqlen=it) for it, most in ROWS)},
    **{part: {"cuda_graph_modules": (part,)} for part in HALVES},
}
# Hidden size and ways, by name.
CASES = {
    f"hidden {hidden}, 24 layers, packs of {TOKENS}": (hidden, ways)
    for hidden, ways in {1024: [*WAYS], 4096: ["eager", "graphed"]}.items()
}
PARTS: Parts = {
    f"{name}: {way}": partial(
        measure_steps,
        step_case(hidden, layers=24, tokens=TOKENS),
        ("eager" if way == "eager" else "graphed",),
        is_full=False,
        **WAYS[way],
    )
    for name, (hidden, ways) in CASES.items()
    for way in ways
}


def _measured(name: str) -> list[Figure]:
    """The figures of one model."""
    answers = {what: measure_part(__name__, f"{name}: {what}") for what in CASES[name][1]}
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
