# SPDX-License-Identifier: Apache-2.0
"""Layers of grouped experts beside Megatron's with Transformer Engine's grouped experts and `SequentialMLP`.

Each kind runs in a process of its own. Walls are of a forward and a backward pass until the device is done,
ours in a graph. Megatron's own wait for counts from the device in each pass, and are eager. All layers have
the same router, which balances nothing. Gradients go to autograd's caller, not to `main_grad`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.children import Answer, measure_part, parts_of, try_part
from benchmarks.measuring.clocks import wall_ms
from benchmarks.measuring.results import Figure, beside_each, timed
from benchmarks.subjects.hosts import recorded
from benchmarks.subjects.packs import hidden_states, model_options, swiglu_experts
from megagraph.demo.trainer import transformer_config
from megagraph.megatron.specs import with_grouped_experts

ROUNDS, WARM_UP = 30, 5
OURS, ENGINES, SEQUENTIAL = "grouped", "Transformer Engine's grouped experts", "SequentialMLP"
BAR = 1.3  # of the time of Transformer Engine's
HIDDEN, INNER, EXPERTS, TOPK = 2048, 1408, 64, 6
_OF = f"tokens, hidden {HIDDEN}, {EXPERTS} experts of {INNER}, top {TOPK}"
CASES = {f"{tokens} {_OF}": tokens for tokens in (4096, 16384)}


def _layer(tokens: int, kind: str) -> Any:
    """SwiGLU experts with random weights; Megatron's groups must be there."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module

    is_engine = kind == ENGINES
    config = transformer_config(
        model_options(HIDDEN, layers=1, tokens=tokens),
        **swiglu_experts(EXPERTS, topk=TOPK, inner=INNER),
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=is_engine,
        use_cpu_initialization=False,
        perform_initialization=False,
    )
    spec = get_moe_module_spec(use_te=is_engine, num_experts=EXPERTS, moe_grouped_gemm=is_engine)
    spec = with_grouped_experts(spec) if kind == OURS else spec
    layer = spec(config=config) if callable(spec) else build_module(spec, config=config)
    layer.set_layer_number(1)
    layer.cuda()
    torch.manual_seed(5)
    with torch.no_grad():
        for param in layer.parameters():
            param.normal_(0.0, 0.02)
    return layer


def measure_kind(tokens: int, kind: str) -> Answer:
    """Walls of a pass in ms."""
    layer = _layer(tokens, kind)
    torch.manual_seed(3)
    rows = hidden_states(tokens, HIDDEN)
    grad = torch.randn_like(rows)

    def run() -> tuple[Tensor, ...]:
        out, _bias = layer(rows)
        return torch.autograd.grad(out, [rows, *layer.parameters()], grad)

    call = recorded(run) if kind == OURS else run
    return {"walls": [wall_ms(call) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]}


PARTS = parts_of(measure_kind, CASES, (OURS, ENGINES, SEQUENTIAL))


def _figures_of(name: str) -> list[Figure]:
    ours = measure_part(__name__, f"{name}: {OURS}")
    rivals = {kind: try_part(__name__, f"{name}: {kind}") for kind in (ENGINES, SEQUENTIAL)}
    figure = timed(f"{name}: forward and backward, in a graph, median", ours["walls"], "ms")
    return beside_each(figure, rivals, "walls", share=BAR)


FIGURES = {name: partial(_figures_of, name) for name in CASES}
