# SPDX-License-Identifier: Apache-2.0
"""A whole training on a GPU: step time and memory, eager and graphed in a process each.

Neither deterministic algorithms nor filled memory; tests/megatron/test_real_hosts.py compares the bits, and
counts allocations and synchronisations.
"""

from functools import partial

import torch

import megagraph
from benchmarks.measuring.children import Answer, measure_part, parts_of
from benchmarks.measuring.results import Figure, against, in_mib, timed
from benchmarks.subjects.hosts import DETERMINISTIC, install_for
from benchmarks.subjects.packs import CASES, Case
from megagraph.demo.compare import time_steps
from megagraph.demo.trainer import Trainer

TIMED_STEPS, WARM_UP_STEPS = 20, 6
HOW = ("eager", "graphed")


def measure_time(case: Case, how: str) -> Answer:
    """Step times and bytes that torch reserved, for packs that are `fitting` and for `all`, of one model."""
    install_for(case.model.max_tokens, *case.max_packed_seqs, cuda_graph_warmup_steps=3)
    trainer = Trainer(case.model)
    steps = case.steps(WARM_UP_STEPS + TIMED_STEPS)
    most = max(case.max_packed_seqs)
    fitting = [[pack for pack in step if pack.num_seqs <= most] for step in steps[:WARM_UP_STEPS]]
    walls: dict[str, list[float]] = {"fitting": [], "all": []}
    reserved = dict.fromkeys(walls, 0)
    for what, packs in [*(("fitting", it) for it in fitting), *(("all", it) for it in steps[WARM_UP_STEPS:])]:
        walls[what].append(time_steps(trainer, [packs], graphs=how == "graphed").median_ms)
        reserved[what] = max(reserved[what], torch.cuda.max_memory_reserved())  # each step counts anew
    return {"walls_ms": walls["all"], **reserved, "report": megagraph.reports()[-1]}


PARTS = parts_of(measure_time, CASES, HOW)


def _figures_of(name: str) -> list[Figure]:
    environment = {"CUBLAS_WORKSPACE_CONFIG": DETERMINISTIC["CUBLAS_WORKSPACE_CONFIG"]}
    eager, graphed = (measure_part(__name__, f"{name}: {how}", environment=environment) for how in HOW)
    step = timed(f"{name}: forward and backward of a step, median", graphed["walls_ms"], "ms")
    peak = in_mib(f"{name}: peak memory reserved", graphed["fitting"])
    of_all = in_mib(f"{peak.name}, with packs over the capacity", graphed["all"])
    report = graphed["report"]
    capture = 1e3 * report["capture_seconds"] / report["graphs"]
    return [
        against(step, "eager", eager["walls_ms"], share=1),
        against(peak, "eager", eager["fitting"], share=1.05),
        against(of_all, "eager", eager["all"]),
        Figure(name=f"{name}: capture", value=capture, unit="ms a graph", bar=40),
    ]


FIGURES = {name: partial(_figures_of, name) for name in CASES}
