# SPDX-License-Identifier: Apache-2.0
"""Trainings of which a part of each layer is in graphs: bits, and which kernels lie inside of graphs."""

import itertools
import re
from collections import Counter
from collections.abc import Mapping

import torch

from benchmarks.measuring.children import Answer
from benchmarks.measuring.timeline import Timeline
from benchmarks.subjects.bits import LAYER_KINDS, BitsCase, spec_of
from benchmarks.subjects.hosts import check_replays, install
from benchmarks.subjects.steps import WARM_UP_STEPS, StepCase, StepTrainer, step_case, trace_of
from megagraph import megatron

STEPS = 100
SCOPES = {"attn": ("attn",), "mlp": ("mlp",), "attn and mlp": ("attn", "mlp")}
BITS = {
    f"{layers}, {scope}": BitsCase(share=0.5, transformer_engine=is_engine, modules=modules)
    for (layers, is_engine), (scope, modules) in itertools.product(LAYER_KINDS.items(), SCOPES.items())
}
# Kernels that one half of a layer has and the other has not, by their names.
KERNELS = {"attention": re.compile(r"flash|fmha|sdpa|attention", re.I), "MLP": re.compile(r"gelu", re.I)}
PROFILED = {
    f"{layers}, kernels of {scope}": (is_engine, SCOPES[scope])
    for (layers, is_engine), scope in itertools.product(LAYER_KINDS.items(), ("attn", "mlp"))
}
PROFILED_CASE = step_case(512, layers=4, tokens=2048)


def count_kernels(timeline: Timeline, kernels: Mapping[str, re.Pattern[str]]) -> dict[str, dict[str, int]]:
    """Kernels of each part of a layer in a step: `inside` of graphs and `outside`.

    Args:
        timeline: of the step.
        kernels: what their names match, by part.
    """
    counts = {part: Counter({"inside": 0, "outside": 0}) for part in kernels}
    for work in timeline.work:
        for part, pattern in kernels.items():
            if pattern.search(work.name):
                counts[part]["outside" if work.graph is None else "inside"] += 1
    return {part: dict(count) for part, count in counts.items()}


def measure_kernels(transformer_engine: bool, modules: tuple[str, ...], case: StepCase) -> Answer:
    """The kernels of a profiled step."""
    install(capacities=(case.capacity,), cuda_graph_modules=modules)
    try:
        trainer = StepTrainer(case.model, beside=False, spec=spec_of(transformer_engine))
        steps = case.batches(torch.device("cuda"))
        for _ in range(WARM_UP_STEPS + 2):
            trainer.wall_ms(steps[0], graphs=True)
        check_replays(megatron.reports()[-1])
        return {**count_kernels(trace_of(trainer, steps[0]), KERNELS)}
    finally:
        megatron.uninstall()
