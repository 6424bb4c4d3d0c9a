# SPDX-License-Identifier: Apache-2.0
"""Memory of graphs: peak against eager's at the same physical tokens, their executables, four capacities.

Each part runs in a process of its own (`python -m benchmarks.bench_memory MODEL/WHAT`). Eager and graphed
steps are padded to the same capacity. Peaks are of torch's allocator, from the start of the process, warm-up
steps and capture included; no optimizer has made its state, which would hide the difference. What lies
outside the allocator is the device's used memory less that, so that nothing else may run beside it. Only the
eager parts run side by side: of them nothing but the allocator's peak is told.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.hosts.prepare_megatron import seed_streams
from benchmarks.measuring.compare import Answer
from benchmarks.measuring.publish import Measurement
from benchmarks.measuring.read_memory import outside_bytes
from benchmarks.measuring.run_children import measure_part
from benchmarks.packs.cases import Case, model_options
from benchmarks.step.train_steps import StepTrainer, batch_of
from megagraph import megatron, results
from megagraph.cli.demo import quiet_megatron
from megagraph.config import GraphConfig
from megagraph.decide.dispatch import Capacity
from megagraph.demo.trainer import ModelOptions, process_groups

WARM_UP_STEPS = 3
FURTHER_STEPS = 3  # the first of them captures
NUM_SEQS = 64
MIB = 2**20
FOUR = "four capacities"
_MODULE = "benchmarks.bench_memory"


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """A model on packs.

    Args:
        hidden: size.
        tokens: of a pack.
        layers: of the model.
        has_four: also measured with three smaller capacities beside the large one.
    """

    hidden: int
    tokens: int
    layers: int = 24
    has_four: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        return f"hidden {self.hidden}, {self.layers} layers, packs of {self.tokens}"

    @property
    def model(self) -> ModelOptions:
        """Its shape."""
        head_dim = 64 if self.hidden <= 1024 else 128
        return model_options(self.hidden, layers=self.layers, tokens=self.tokens, head_dim=head_dim)

    def capacities(self, what: str) -> tuple[Capacity, ...]:
        """The largest; for `FOUR` also one of fewer documents and two of fewer tokens."""
        tokens = self.tokens
        largest = Capacity(tokens=tokens, num_seqs=NUM_SEQS, max_seqlen=tokens)
        if what != FOUR:
            return (largest,)
        return (
            largest,
            Capacity(tokens=tokens, num_seqs=8, max_seqlen=tokens),
            Capacity(tokens=tokens // 2, num_seqs=NUM_SEQS // 2, max_seqlen=tokens // 2),
            Capacity(tokens=tokens // 4, num_seqs=NUM_SEQS // 4, max_seqlen=tokens // 4),
        )


CASES = {
    case.name: case
    for case in (
        MemoryCase(hidden=1024, tokens=8192, has_four=True),
        MemoryCase(hidden=4096, tokens=8192),
    )
}


def measure(case: MemoryCase, what: str) -> Answer:
    """Memory of a few steps: `graphed`, graphed with `FOUR`, or `eager`, of which only `reserved` is told."""
    megatron.install(
        GraphConfig(
            capacities=case.capacities(what),
            cuda_graph_warmup_steps=WARM_UP_STEPS,
            progress=False,
            log_interval=0,
        )
    )
    graphs = what != "eager"
    trainer = StepTrainer(case.model, beside=False)
    packs = Case(
        name=case.name, model=case.model, max_packed_seqs=(NUM_SEQS,), mean_length=case.tokens // 8
    ).steps(WARM_UP_STEPS + FURTHER_STEPS)
    steps = [[batch_of(pack, trainer.device) for pack in step] for step in packs]
    for batches in steps[:WARM_UP_STEPS]:
        trainer.wall_ms(batches, graphs=graphs)
    outside_before = outside_bytes()
    for batches in steps[WARM_UP_STEPS:]:
        trainer.wall_ms(batches, graphs=graphs)
    report = megatron.reports()[-1]
    if graphs and (report["failures"] or not report["replays"]):
        raise RuntimeError(f"expected replays, got {report['eager']}, {report['failures']}")
    reserved = torch.cuda.max_memory_reserved()
    if not graphs:
        return {"reserved": reserved}
    return {
        "reserved": reserved,
        "outside_before": outside_before,
        "outside": outside_bytes(),
        "graphs": report["graphs"],
        "pools": report["pool_bytes"],
    }


def figures_of(case: MemoryCase, answers: dict[str, Answer]) -> list[results.Figure]:
    """The figures of one model, from what its processes answered."""
    eager, graphed = answers["eager"], answers["graphed"]

    def figure(what: str, value: float, unit: str = "MiB", **more: Any) -> results.Figure:
        return results.Figure(name=f"{case.name}: {what}", value=value, unit=unit, **more)

    def executables(answer: Answer) -> int:
        return int(answer["outside"] - answer["outside_before"])

    reserved = eager["reserved"] / MIB
    figures = [
        figure(
            "peak memory reserved",
            graphed["reserved"] / MIB,
            bar=1.05 * reserved,
            rival="eager, the same physical tokens",
            rival_value=reserved,
        ),
        figure(
            "device memory in all, executables and CUDA's own included",
            (graphed["reserved"] + graphed["outside"]) / MIB,
            rival="eager, the same physical tokens",
            rival_value=reserved + graphed["outside_before"] / MIB,
        ),
        figure("graphs", graphed["graphs"], "graphs"),
        figure("executables, outside the allocator", executables(graphed) / MIB),
        figure("executables, for each graph", executables(graphed) / graphed["graphs"] / 1024, "KiB"),
        figure("pools of the graphs", graphed["pools"] / MIB),
    ]
    if FOUR not in answers:
        return figures
    four, largest = answers[FOUR], graphed["reserved"] / MIB
    return [
        *figures,
        figure(
            f"{FOUR}, peak memory reserved",
            four["reserved"] / MIB,
            bar=1.10 * largest,
            rival="the largest capacity alone",
            rival_value=largest,
        ),
        figure(
            f"{FOUR}, pools of the graphs",
            four["pools"] / MIB,
            bar=1.10 * graphed["pools"] / MIB,
            rival="the largest capacity alone",
            rival_value=graphed["pools"] / MIB,
        ),
        figure(
            f"{FOUR}, executables, outside the allocator",
            executables(four) / MIB,
            rival="the largest capacity alone",
            rival_value=executables(graphed) / MIB,
        ),
    ]


def run() -> None:
    """Measures every model; writes benchmarks/results/memory.json."""
    with ThreadPoolExecutor(len(CASES)) as pool:  # of eager steps only the allocator's peak counts
        eager = {name: pool.submit(measure_part, _MODULE, f"{name}/eager") for name in CASES}

    def measured(case: MemoryCase) -> list[results.Figure]:
        parts = ("graphed", FOUR) if case.has_four else ("graphed",)
        answers = {what: measure_part(_MODULE, f"{case.name}/{what}") for what in parts}
        return figures_of(case, {"eager": eager[case.name].result(), **answers})

    measurement = Measurement("memory")
    for name, case in CASES.items():
        measurement.take(name, partial(measured, case))
    measurement.publish()


def _measure(part: str) -> None:
    name, _, what = part.partition("/")
    quiet_megatron()
    with process_groups():
        seed_streams()
        print(json.dumps(measure(CASES[name], what)), flush=True)
        megatron.uninstall()


if __name__ == "__main__":
    _measure(sys.argv[1])
