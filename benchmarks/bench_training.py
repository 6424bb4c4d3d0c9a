# SPDX-License-Identifier: Apache-2.0
"""A whole training on a GPU: step time and memory; and step times beside the graphs that Megatron brings.

Each measurement runs in a process of its own, so that memory is that of one model. Neither deterministic
algorithms nor filled memory, eager and graphed alike; tests/megatron/test_real_hosts.py compares the bits,
and counts allocations and synchronisations.

Megatron's graphs, or what they answer, are measured on packs as they come, and on canonical packs, whose
shapes never change: each rival beside ours on the same packs, with deterministic algorithms in all of them
alike.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.measuring.children import Answer, measure_part, try_part
from benchmarks.measuring.clocks import MIB
from benchmarks.measuring.figures import Measurement, beside_each, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import (
    DETERMINISTIC,
    Parts,
    answering,
    check_replays,
    create_engines_graphs,
    engines_spec,
    install_for,
    prepare_megatrons_graphs,
    walls_ms,
)
from benchmarks.subjects.packs import CASES, MICRO_BATCHES, Case, model_options
from megagraph import megatron
from megagraph.demo.packs import Pack
from megagraph.demo.trainer import Trainer

TIMED_STEPS, WARM_UP_STEPS = 20, 6
HOW = ("eager", "graphed")
# By model, its rivals among Megatron's graphs.
MODELS = {
    "Transformer Engine, hidden 1024": ("local", "transformer_engine"),
    "local, hidden 1024": ("local",),
}
PACKS = ("", ", canonical packs")  # as they come, or of one shape
ENVIRONMENT = {**DETERMINISTIC, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "4"}
# Transformer Engine's deterministic attention of packs takes 128 bytes for each document * head * longest**2.
LONGEST, NUM_SEQS = 1024, 20
MODEL = model_options(1024, layers=24, tokens=4096)
CASE = Case(name="packs", model=MODEL, max_packed_seqs=(8, NUM_SEQS), mean_length=512, longest=LONGEST)


def measure_time(case: Case, *, graphs: bool) -> Answer:
    """Step times and MiB that torch reserved, for packs that are `fitting` and for `all`, of one model."""
    install_for(case.model.max_tokens, *case.max_packed_seqs, cuda_graph_warmup_steps=3)
    trainer = Trainer(case.model)
    steps = case.steps(WARM_UP_STEPS + TIMED_STEPS)
    fitting = [[pack for pack in step if pack.num_seqs <= max(case.max_packed_seqs)] for step in steps]
    _, reserved = walls_ms(trainer, fitting[:WARM_UP_STEPS], graphs=graphs)
    walls, most = walls_ms(trainer, steps[WARM_UP_STEPS:], graphs=graphs)
    report = megatron.reports()[-1]
    return {"walls_ms": walls, "fitting": reserved / MIB, "all": most / MIB, "report": report}


def canonical(pack: Pack) -> Pack:
    """A pack of the one shape: one more document fills the rows up, empty ones follow."""
    tokens = MODEL.max_tokens
    missing = NUM_SEQS + 1 - pack.cu_seqlens.numel()
    offsets = torch.nn.functional.pad(pack.cu_seqlens, (0, missing), value=tokens)
    rows = torch.nn.functional.pad(pack.tokens, (0, tokens - pack.num_tokens))
    return dataclasses.replace(pack, tokens=rows, cu_seqlens=offsets, max_seqlen=LONGEST)


def measure_beside(name: str, kind: str, *, one_shape: bool) -> Answer:
    """Step times of one way to run a model, on packs that fit.

    `eager` or `graphed`; `local` or `transformer_engine`, Megatron's own graphs, with nothing of ours.
    """
    torch.use_deterministic_algorithms(True)
    steps = [
        [canonical(pack) if one_shape else pack for pack in step if pack.num_seqs < NUM_SEQS]
        for step in CASE.steps(WARM_UP_STEPS + TIMED_STEPS)
    ]
    transformer: dict[str, Any] = {}
    if kind in HOW:
        install_for(MODEL.max_tokens, *CASE.max_packed_seqs, max_seqlen=LONGEST)
    else:
        prepare_megatrons_graphs(MICRO_BATCHES)
        transformer = {"cuda_graph_impl": kind, "cuda_graph_modules": []}
    is_engine = name.startswith("Transformer Engine")
    spec = engines_spec() if is_engine else None
    trainer = Trainer(MODEL, config={"apply_rope_fusion": is_engine, **transformer}, spec=spec)
    graphs, half = kind != "eager", WARM_UP_STEPS // 2
    walls_ms(trainer, steps[:half], graphs=graphs)
    if kind == "transformer_engine":
        create_engines_graphs(trainer).cuda_graph_set_manual_hooks()
    walls_ms(trainer, steps[half:WARM_UP_STEPS], graphs=graphs)
    walls, _ = walls_ms(trainer, steps[WARM_UP_STEPS:], graphs=graphs)
    if kind == "graphed":
        check_replays(megatron.reports()[-1])
    return {"walls_ms": walls}


def _parts() -> dict[str, Callable[[], Answer]]:
    parts: dict[str, Callable[[], Answer]] = {
        f"{name}: {how}": partial(measure_time, case, graphs=how == "graphed")
        for name, case in CASES.items()
        for how in HOW
    }
    for (name, rivals), packs in itertools.product(MODELS.items(), PACKS):
        for kind in (*HOW, *rivals):
            parts[f"{name}: {kind}{packs}"] = partial(measure_beside, name, kind, one_shape=bool(packs))
    return parts


PARTS: Parts = _parts()
answer = answering(PARTS)


def _wall(answer: Answer) -> float:
    return float(median(answer["walls_ms"]))


def _training_figures(name: str) -> list[Figure]:
    environment = {"CUBLAS_WORKSPACE_CONFIG": DETERMINISTIC["CUBLAS_WORKSPACE_CONFIG"]}
    eager, graphed = (measure_part(__name__, f"{name}: {how}", environment=environment) for how in HOW)
    report, peak = graphed["report"], f"{name}: peak memory reserved"
    rival: dict[str, Any] = {"bar": _wall(eager), "rival": "eager", "rival_value": _wall(eager)}
    capture = 1e3 * report["capture_seconds"] / report["graphs"]

    def beside(what: str, key: str, bar: float | None) -> Figure:
        of, its = graphed[key], eager[key]
        return Figure(name=what, value=of, unit="MiB", bar=bar, rival="eager", rival_value=its)

    return [
        timed(f"{name}: forward and backward of a step, median", graphed["walls_ms"], "ms", **rival),
        beside(peak, "fitting", 1.05 * eager["fitting"]),
        beside(f"{peak}, with packs over the capacity", "all", None),
        Figure(name=f"{name}: capture", value=capture, unit="ms a graph", bar=40),
    ]


def _figures_beside(name: str, packs: str) -> list[Figure]:
    eager, ours = (measure_part(__name__, f"{name}: {how}{packs}", environment=ENVIRONMENT) for how in HOW)
    others = {f"eager{packs}": eager}
    for kind in MODELS[name]:
        rival = try_part(__name__, f"{name}: {kind}{packs}", timeout=130, environment=ENVIRONMENT)
        others[f"Megatron's graphs, {kind}{packs}"] = rival
    title = f"{name}: forward and backward of a step, median{packs}"
    return beside_each(timed(title, ours["walls_ms"], "ms", bar=_wall(eager)), others, _wall)


def measure(measurement: Measurement) -> None:
    """Measures every case, and every model beside Megatron's graphs on each kind of packs."""
    for name in CASES:
        measurement.take(name, partial(_training_figures, name))
    for packs, name in itertools.product(PACKS, MODELS):
        measurement.take(f"{name}{packs}", partial(_figures_beside, name, packs))
