# SPDX-License-Identifier: Apache-2.0
"""Step times beside the graphs that Megatron brings, or what those answer.

On packs as they come, and on canonical packs, whose shapes never change: each rival beside ours on the same
packs. Every way to run a model has a process of its own, deterministic algorithms in all of them alike; fresh
memory is not filled while a step is timed.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.measuring.children import Answer, measure_part, try_part
from benchmarks.measuring.figures import Measurement, beside_each, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import answer_ours, answer_rival, check_replays, install_for, walls_ms
from benchmarks.subjects.hosts import prepare_megatrons_graphs as prepare
from benchmarks.subjects.packs import MICRO_BATCHES, Case, model_options
from megagraph import megatron
from megagraph.demo.packs import Pack
from megagraph.demo.trainer import Trainer

TIMED_STEPS, WARM_UP_STEPS = 20, 6
CAPTURED_STEPS = 3  # after which Transformer Engine's graphs are made
SECONDS, RIVAL_SECONDS = 300, 130
# By model, its rivals.
MODELS = {
    "Transformer Engine, hidden 1024": ("local", "transformer_engine"),
    "local, hidden 1024": ("local",),
}
OURS = ("eager", "megagraph")
PACKS = ("", ", canonical packs")  # as they come, or of one shape
ENVIRONMENT = {
    **{"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    **{"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "OMP_NUM_THREADS": "4"},
}
# Transformer Engine's deterministic attention of packs takes 128 bytes for each document * head * longest**2.
LONGEST, NUM_SEQS = 1024, 20
MODEL = model_options(1024, layers=24, tokens=4096)
CASE = Case(name="packs", model=MODEL, max_packed_seqs=(8, NUM_SEQS), mean_length=512, longest=LONGEST)


def _trainer(name: str, **transformer: Any) -> Trainer:
    spec = None
    if name.startswith("Transformer Engine"):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        spec = get_gpt_layer_with_transformer_engine_spec()
        transformer = {"apply_rope_fusion": True, **transformer}
    return Trainer(MODEL, config=transformer, spec=spec)


def canonical(pack: Pack) -> Pack:
    """A pack of the one shape: one more document fills the rows up, empty ones follow."""
    tokens = MODEL.max_tokens
    missing = NUM_SEQS + 1 - pack.cu_seqlens.numel()
    offsets = torch.nn.functional.pad(pack.cu_seqlens, (0, missing), value=tokens)
    rows = torch.nn.functional.pad(pack.tokens, (0, tokens - pack.num_tokens))
    return dataclasses.replace(pack, tokens=rows, cu_seqlens=offsets, max_seqlen=LONGEST)


def measure_time(name: str, kind: str, *, one_shape: bool) -> Answer:
    """Step times of one way to run a model, on packs that fit.

    `eager` or `megagraph`; `local` or `transformer_engine`, Megatron's own graphs, with nothing of ours.
    """
    torch.use_deterministic_algorithms(True)
    steps = [
        [canonical(pack) if one_shape else pack for pack in step if pack.num_seqs < NUM_SEQS]
        for step in CASE.steps(WARM_UP_STEPS + TIMED_STEPS)
    ]
    if kind in OURS:
        install_for(MODEL.max_tokens, *CASE.max_packed_seqs, max_seqlen=LONGEST)
        trainer = _trainer(name)
        walls_ms(trainer, steps[:WARM_UP_STEPS], graphs=kind == "megagraph")
    else:
        trainer = _with_megatrons_graphs(name, kind, steps[:WARM_UP_STEPS])
    walls, _ = walls_ms(trainer, steps[WARM_UP_STEPS:], graphs=kind != "eager")
    if kind == "megagraph":
        check_replays(megatron.reports()[-1])
    return {"walls_ms": walls}


def _with_megatrons_graphs(name: str, impl: str, steps: Sequence[Sequence[Pack]]) -> Trainer:
    prepare(MICRO_BATCHES)
    trainer = _trainer(name, cuda_graph_impl=impl, cuda_graph_modules=[])
    walls_ms(trainer, steps[:CAPTURED_STEPS], graphs=True)
    if impl == "transformer_engine":
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        of = {"model": [trainer.model], "config": trainer.chunk.config, "optimizers": [trainer.optimizer]}
        helper = TECudaGraphHelper(**of, seq_length=MODEL.max_tokens, micro_batch_size=1)
        helper.create_cudagraphs()
        helper.cuda_graph_set_manual_hooks()
    walls_ms(trainer, steps[CAPTURED_STEPS:], graphs=True)
    return trainer


def figures_of(
    name: str, packs: str, ours: Answer, eager: Answer, rivals: Mapping[str, Answer]
) -> list[Figure]:
    """Our step on some packs beside eager's and the rivals' on the same packs."""
    others = {"eager": eager, **{f"Megatron's graphs, {rival}": answer for rival, answer in rivals.items()}}
    title = f"{name}: forward and backward of a step, median{packs}"
    figure = timed(title, ours["walls_ms"], "ms", bar=median(eager["walls_ms"]))
    by_name = {f"{rival}{packs}": answer for rival, answer in others.items()}
    return beside_each(figure, by_name, lambda answer: median(answer["walls_ms"]))


def measure(measurement: Measurement) -> None:
    """Measures every model on each kind of packs."""

    def times(packs: str, name: str) -> list[Figure]:
        ask = partial(measure_part, __name__, name, timeout=SECONDS, environment=ENVIRONMENT)
        try_rival = partial(try_part, __name__, name, timeout=RIVAL_SECONDS, environment=ENVIRONMENT)
        eager, ours = ask(f"eager{packs}"), ask(f"megagraph{packs}")
        return figures_of(name, packs, ours, eager, {of: try_rival(of + packs) for of in MODELS[name]})

    for packs, name in itertools.product(PACKS, MODELS):
        measurement.take(f"times of {name}{packs}", partial(times, packs, name))


def answer(name: str, what: str) -> None:
    """One way to run a model on some packs."""
    kind, _, packs = what.partition(", ")
    call = partial(measure_time, name, kind, one_shape=bool(packs))
    answer_ours(call, seeded=True) if kind in OURS else answer_rival(call)
