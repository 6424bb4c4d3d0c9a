# SPDX-License-Identifier: Apache-2.0
"""Trainings of layers with experts of which more and more is in graphs: steps, peaks, and whose kernels.

Beside them Megatron's own graphs of the same parts, which take no packs: they get as many tokens as one
document of one shape.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.children import Answer
from benchmarks.subjects.bits import LAYER_KINDS
from benchmarks.subjects.halves import count_kernels
from benchmarks.subjects.hosts import check_replays, install, prepare_megatrons_graphs
from benchmarks.subjects.packs import MICRO_BATCHES
from benchmarks.subjects.steps import (
    RIVAL_WARM_UP_STEPS,
    WARM_UP_STEPS,
    Batch,
    StepTrainer,
    mean_loss,
    rows_of,
    step_case,
    trace_of,
    without_collection,
)
from megagraph import megatron
from megagraph.megatron.specs import get_gpt_layer_varlen_spec

EAGER = "mode eager"
SCOPES: Mapping[str, tuple[str, ...]] = {
    EAGER: (),
    "attn": ("attn",),
    "attn, moe_router": ("attn", "moe_router"),
    "attn, moe_router, moe_preprocess": ("attn", "moe_router", "moe_preprocess"),
}
EXPERTS, ROUNDS = 8, 9
CASE = step_case(1024, layers=8, tokens=4096)
# By name: whether layers are Transformer Engine's, and what is in graphs.
PARTS = {
    f"{layers}: {scopes}": (is_engine, scopes)
    for layers, is_engine in LAYER_KINDS.items()
    for scopes in SCOPES
}
# Of those, what Megatron's own graphs are made of, too.
RIVALS = {name: scopes for name, (is_engine, scopes) in PARTS.items() if is_engine and scopes != EAGER}
# Kernels that one part of a layer has and no other has, by their names.
KERNELS = {
    "attention": re.compile(r"flash|fmha|sdpa|attention", re.I),
    "router": re.compile(r"topk", re.I),
    "permutation": re.compile(r"sort", re.I),
    "experts": re.compile(r"gelu", re.I),
}


def _spec(is_engine: bool) -> Any:
    if not is_engine:
        return get_gpt_layer_varlen_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec(num_experts=EXPERTS, moe_grouped_gemm=True)


def _experts(is_engine: bool) -> dict[str, Any]:
    """Dropless, as most are trained."""
    return {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 1024,
        "moe_grouped_gemm": is_engine,
        "add_bias_linear": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
    }


def measure_scopes(is_engine: bool, scopes: str) -> Answer:
    """Walls of steps in ms, the peak that torch reserved by then.

    Of a profiled step: whose kernels are inside of graphs, how much of all work is, and the host's time in
    microseconds for one layer of one micro-batch.
    """
    mode = "eager" if scopes == EAGER else "graph"
    install(capacities=(CASE.capacity,), cuda_graph_modules=SCOPES[scopes], mode=mode)
    try:
        trainer = StepTrainer(CASE.model, beside=False, spec=_spec(is_engine), **_experts(is_engine))
        steps = CASE.batches(torch.device("cuda"))
        for index in range(WARM_UP_STEPS + len(steps)):
            trainer.wall_ms(steps[index % len(steps)], graphs=True)
        walls = [trainer.wall_ms(steps[index], graphs=True) for index in CASE.rounds(ROUNDS)]
        reserved = torch.cuda.max_memory_reserved()
        report = megatron.reports()[-1]
        if mode == "graph":
            check_replays(report)
        timeline = trace_of(trainer, steps[0])
        return {
            **{"walls_ms": walls, "reserved": reserved, "report": report},
            **{"kernels": count_kernels(timeline, KERNELS), "graphed_share": timeline.graphed_share()},
            "host_us": timeline.host_us() / (MICRO_BATCHES * CASE.model.layers),
        }
    finally:
        megatron.uninstall()


class UnpackedTrainer(StepTrainer):
    """Gives its model each batch as one document, without a pack."""

    def _forward_step(self, packs: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        batch: Batch = next(packs)
        return model(**rows_of(batch)), partial(mean_loss, mask=batch["mask"])


def measure_megatrons(scopes: str) -> Answer:
    """Walls of steps in ms with Megatron's graphs of Transformer Engine's layers, on batches of one shape."""
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    prepare_megatrons_graphs(MICRO_BATCHES)
    graphs: dict[str, Any] = {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": list(SCOPES[scopes]),
    }
    trainer = UnpackedTrainer(CASE.model, beside=True, spec=_spec(True), **graphs, **_experts(True))
    steps = CASE.batches(torch.device("cuda"), canonical=True)
    for index in range(RIVAL_WARM_UP_STEPS):
        trainer.wall_ms(steps[index % len(steps)], graphs=True)
    of = {"model": [trainer.model], "config": trainer.chunk.config, "optimizers": [trainer.optimizer]}
    helper = TECudaGraphHelper(**of, seq_length=CASE.tokens, micro_batch_size=1)
    helper.create_cudagraphs()
    for index in range(RIVAL_WARM_UP_STEPS):
        trainer.wall_ms(steps[index % len(steps)], graphs=True)
    with without_collection():
        return {"walls_ms": [trainer.wall_ms(steps[index], graphs=True) for index in CASE.rounds(ROUNDS)]}
