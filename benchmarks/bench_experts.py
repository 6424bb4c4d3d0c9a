# SPDX-License-Identifier: Apache-2.0
"""Layers of grouped experts beside Megatron's with Transformer Engine's grouped experts and `SequentialMLP`.

Each kind runs in a process of its own. Walls are of a forward and a backward pass until the device is done,
ours in a graph. Megatron's own wait for counts from the device in each pass, and are eager. All layers have
the same router, which balances nothing. Gradients go to autograd's caller, not to `main_grad`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring.children import Answer, measure_part, try_part
from benchmarks.measuring.clocks import wall_ms
from benchmarks.measuring.figures import Measurement, beside_each, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import Parts, answering, on_side_stream
from benchmarks.subjects.packs import hidden_states, model_options
from megagraph.demo.trainer import transformer_config
from megagraph.megatron.specs import with_grouped_experts

ROUNDS, WARM_UP = 30, 5
OURS, ENGINES, SEQUENTIAL = "grouped", "Transformer Engine's grouped experts", "SequentialMLP"
BAR = 1.3  # of the time of Transformer Engine's


@dataclass(frozen=True, kw_only=True)
class ExpertCase:
    """One shape: SwiGLU experts of `inner` columns on rows of `hidden`, `topk` for each row."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    topk: int

    def __str__(self) -> str:
        sizes = f"hidden {self.hidden}, {self.experts} experts of {self.inner}, top {self.topk}"
        return f"{self.tokens} tokens, {sizes}"

    def layer(self, kind: str) -> Any:
        """One with random weights; Megatron's groups must be there."""
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.spec_utils import build_module

        is_engine = kind == ENGINES
        config = transformer_config(
            model_options(self.hidden, layers=1, tokens=self.tokens),
            num_moe_experts=self.experts,
            moe_router_topk=self.topk,
            moe_ffn_hidden_size=self.inner,
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            moe_grouped_gemm=is_engine,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=F.silu,
            bias_activation_fusion=True,
            use_cpu_initialization=False,
            perform_initialization=False,
        )
        spec = get_moe_module_spec(use_te=is_engine, num_experts=self.experts, moe_grouped_gemm=is_engine)
        spec = with_grouped_experts(spec) if kind == OURS else spec
        layer = spec(config=config) if callable(spec) else build_module(spec, config=config)
        layer.set_layer_number(1)
        layer.cuda()
        torch.manual_seed(5)
        with torch.no_grad():
            for param in layer.parameters():
                param.normal_(0.0, 0.02)
        return layer


CASES = (
    ExpertCase(tokens=4096, hidden=2048, inner=1408, experts=64, topk=6),
    ExpertCase(tokens=16384, hidden=2048, inner=1408, experts=64, topk=6),
    ExpertCase(tokens=8192, hidden=4096, inner=2048, experts=64, topk=8),
)


def measure_kind(case: ExpertCase, kind: str) -> Answer:
    """Walls of a pass in ms."""
    layer = case.layer(kind)
    torch.manual_seed(3)
    rows = hidden_states(case.tokens, case.hidden)
    grad = torch.randn_like(rows)

    def run() -> tuple[Tensor, ...]:
        out, _bias = layer(rows)
        return torch.autograd.grad(out, [rows, *layer.parameters()], grad)

    with on_side_stream():
        for _ in range(WARM_UP):
            run()
    call: Callable[[], object] = run
    if kind == OURS:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        call = graph.replay
    return {"walls": [wall_ms(call) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]}


KINDS = (OURS, ENGINES, SEQUENTIAL)
PARTS: Parts = {f"{case}: {kind}": partial(measure_kind, case, kind) for case in CASES for kind in KINDS}
answer = answering(PARTS)


def _wall(answer: Answer) -> float:
    return float(median(answer["walls"]))


def _figures_of(case: ExpertCase) -> list[Figure]:
    ours = measure_part(__name__, f"{case}: {OURS}")
    rivals = {kind: try_part(__name__, f"{case}: {kind}") for kind in (ENGINES, SEQUENTIAL)}
    bar = None if "error" in rivals[ENGINES] else BAR * _wall(rivals[ENGINES])
    title = f"{case}: forward and backward, in a graph, median"
    return beside_each(timed(title, ours["walls"], "ms", bar=bar), rivals, _wall)


def measure(measurement: Measurement) -> None:
    """Measures every case."""
    for case in CASES:
        measurement.take(str(case), partial(_figures_of, case))
