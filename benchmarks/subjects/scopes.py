# SPDX-License-Identifier: Apache-2.0
"""Layers with experts, more and more of them in graphs: steps, peaks, whose kernels lie where."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.measuring.children import Answer
from benchmarks.subjects.groundwork import count_kernels
from benchmarks.subjects.hosts import check_replays, install
from benchmarks.subjects.right import LAYER_KINDS
from benchmarks.subjects.steps import WARM_UP_STEPS, StepTrainer, step_case, trace_of
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
    """Walls of steps in ms, the peak that torch reserved by then, and kernels of a profiled step."""
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
        kernels = count_kernels(trace_of(trainer, steps[0]), KERNELS)
        return {"walls_ms": walls, "reserved": reserved, "kernels": kernels, "report": report}
    finally:
        megatron.uninstall()
