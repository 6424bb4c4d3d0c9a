# SPDX-License-Identifier: Apache-2.0
"""Memory of graphs: peak against eager's at the same physical tokens, their executables, four capacities.

Each part runs in a process of its own. Eager and graphed steps are padded to the same capacity. Peaks are of
torch's allocator, from the start of the process, warm-up steps and capture included; no optimizer has made
its state, which would hide the difference. What lies outside the allocator is the device's used memory less
that, so that nothing else may run beside it.
"""

from collections.abc import Mapping
from functools import partial

import torch

from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.clocks import outside_bytes
from benchmarks.measuring.figures import Measurement, plain
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import answer_ours, check_replays, install
from benchmarks.subjects.steps import NUM_SEQS, StepCase, StepTrainer, batch_of, step_case
from megagraph import megatron
from megagraph.decide.dispatch import Capacity

WARM_UP_STEPS = 3
FURTHER_STEPS = 3  # the first of them captures
MIB = 2**20
FOUR = "four capacities"
PARTS = ("attn", "mlp")  # of each layer, the other half eager
# By name; whether also measured with three smaller capacities beside the large one.
CASES = {
    f"hidden {hidden}, 24 layers, packs of 8192": (step_case(hidden, layers=24, tokens=8192), has_four)
    for hidden, has_four in {1024: True, 4096: False}.items()
}


def capacities(case: StepCase, what: str) -> tuple[Capacity, ...]:
    """The largest; for `FOUR` also one of fewer documents and two of fewer tokens."""
    tokens = case.tokens
    further = ((tokens, 8), (tokens // 2, NUM_SEQS // 2), (tokens // 4, NUM_SEQS // 4))
    smaller = (Capacity(tokens=rows, num_seqs=count, max_seqlen=rows) for rows, count in further)
    return (case.capacity, *(smaller if what == FOUR else ()))


def measure_memory(case: StepCase, what: str) -> Answer:
    """Memory of a few steps: `graphed`, with `FOUR`, one of `PARTS`; of `eager` only `reserved`."""
    modules = (what,) if what in PARTS else ()
    install(
        capacities=capacities(case, what),
        cuda_graph_warmup_steps=WARM_UP_STEPS,
        cuda_graph_modules=modules,
    )
    graphs = what != "eager"
    trainer = StepTrainer(case.model, beside=False)
    packs = case.steps(WARM_UP_STEPS + FURTHER_STEPS)
    steps = [[batch_of(pack, trainer.device) for pack in step] for step in packs]
    for index, batches in enumerate(steps):
        if index == WARM_UP_STEPS:
            outside_before = outside_bytes()
        trainer.wall_ms(batches, graphs=graphs)
    reserved = torch.cuda.max_memory_reserved()
    if not graphs:
        return {"reserved": reserved}
    report = megatron.reports()[-1]
    check_replays(report)
    outside = {"outside_before": outside_before, "outside": outside_bytes()}
    return {"reserved": reserved, **outside, "graphs": report["graphs"], "pools": report["pool_bytes"]}


def figures_of(name: str, answers: Mapping[str, Answer]) -> list[Figure]:
    """The figures of one model, from what its processes answered."""
    graphed, of_eager = answers["graphed"], answers["eager"]["reserved"]

    def executables(answer: Answer) -> int:
        return int(answer["outside"] - answer["outside_before"])

    def beside(what: str, value: float, rival: str, its: float, slack: float | None = None) -> Figure:
        bar = None if slack is None else slack * its / MIB
        title, value, its = f"{name}: {what}", value / MIB, its / MIB
        return Figure(name=title, value=value, unit="MiB", bar=bar, rival=rival, rival_value=its)

    same, peak = "eager, the same physical tokens", "peak memory reserved"
    outside = "executables, outside the allocator"
    whole = "device memory in all, executables and CUDA's own included"
    figures = [
        beside(peak, graphed["reserved"], same, of_eager, 1.05),
        beside(whole, graphed["reserved"] + graphed["outside"], same, of_eager + graphed["outside_before"]),
    ]
    values = {
        "graphs": (graphed["graphs"], "graphs"),
        outside: (executables(graphed) / MIB, "MiB"),
        "executables, for each graph": (executables(graphed) / graphed["graphs"] / 1024, "KiB"),
        "pools of the graphs": (graphed["pools"] / MIB, "MiB"),
    }
    figures += plain(name, values)
    if FOUR in answers:
        four, one = answers[FOUR], "the largest capacity alone"
        figures += [
            beside(f"{FOUR}, {peak}", four["reserved"], one, graphed["reserved"], 1.10),
            beside(f"{FOUR}, pools of the graphs", four["pools"], one, graphed["pools"], 1.10),
            beside(f"{FOUR}, {outside}", executables(four), one, executables(graphed)),
        ]
    return figures


def measure(measurement: Measurement) -> None:
    """Measures every model."""

    def measured(name: str, has_four: bool) -> list[Figure]:
        parts = ("eager", "graphed", *([FOUR] if has_four else []))
        return figures_of(name, {what: measure_part(__name__, name, what) for what in parts})

    for name, (_, has_four) in CASES.items():
        measurement.take(name, partial(measured, name, has_four))


def answer(name: str, what: str) -> None:
    """A model, graphed or eager."""
    answer_ours(lambda: measure_memory(CASES[name][0], what), seeded=True)
