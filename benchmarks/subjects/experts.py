# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of one layer of experts: grouped, in a graph and eager, and Megatron's own.

All layers have the same router, which balances nothing. Gradients go to autograd's caller, not to
`main_grad`. Megatron's own wait for counts from the device in each pass, and are eager.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import device_work, wall_ms
from benchmarks.subjects.hosts import on_side_stream
from benchmarks.subjects.packs import hidden_states, model_options
from megagraph.demo.trainer import transformer_config
from megagraph.megatron.specs import with_grouped_experts

ROUNDS, WARM_UP, PROFILED = 30, 5, 10
TO_HOST = "DtoH"  # in a profiler's name of a copy


@dataclass(frozen=True, kw_only=True)
class ExpertCase:
    """One shape: SwiGLU experts of `inner` columns on rows of `hidden`, `topk` for each row."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    topk: int

    @property
    def name(self) -> str:
        """For figures."""
        sizes = f"hidden {self.hidden}, {self.experts} experts of {self.inner}, top {self.topk}"
        return f"{self.tokens} tokens, {sizes}"

    def config(self, **changes: Any) -> Any:
        """Megatron's."""
        options = model_options(self.hidden, layers=1, tokens=self.tokens)
        fields = {
            "num_moe_experts": self.experts,
            "moe_router_topk": self.topk,
            "moe_ffn_hidden_size": self.inner,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "bias_activation_fusion": True,
            "use_cpu_initialization": False,
            "perform_initialization": False,
        }
        return transformer_config(options, **{**fields, **changes})


def _spec(use_te: bool, case: ExpertCase) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    return get_moe_module_spec(use_te=use_te, num_experts=case.experts, moe_grouped_gemm=use_te)


# How each kind of layer is made: whether of Transformer Engine's modules, what becomes of the spec, options.
Made = tuple[bool, Callable[[Any], Any], Mapping[str, Any]]
KINDS: dict[str, Made] = {
    "grouped": (False, with_grouped_experts, {}),
    "Transformer Engine's grouped experts": (True, lambda spec: spec, {"moe_grouped_gemm": True}),
    "Transformer Engine's grouped experts, fused permutation": (
        True,
        lambda spec: spec,
        {"moe_grouped_gemm": True, "moe_permute_fusion": True},
    ),
    "SequentialMLP": (False, lambda spec: spec, {}),
}


def make(case: ExpertCase, kind: str) -> Any:
    """A layer with random weights; Megatron's groups must be there."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module

    use_te, changed, options = KINDS[kind]
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    spec, config = changed(_spec(use_te, case)), case.config(**options)
    layer = spec(config=config) if callable(spec) else build_module(spec, config=config)
    layer.set_layer_number(1)
    torch.manual_seed(5)
    layer.cuda()
    with torch.no_grad():
        for param in layer.parameters():
            param.normal_(0.0, 0.02)
    return layer


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """Forward and backward of a layer on the same rows."""

    layer: Any
    rows: Tensor
    grad: Tensor

    def __call__(self) -> tuple[Tensor, ...]:
        """The output, and the gradients of rows and parameters."""
        out, _bias = self.layer(self.rows)
        return out, *torch.autograd.grad(out, [self.rows, *self.layer.parameters()], self.grad)


def _pass_of(case: ExpertCase, layer: Any) -> _Pass:
    torch.manual_seed(3)
    rows = hidden_states(case.tokens, case.hidden).detach().requires_grad_()
    return _Pass(layer=layer, rows=rows, grad=torch.randn_like(rows))


def measure_kind(case: ExpertCase, kind: str) -> Answer:
    """Walls and kernels of a pass, eager and (grouped ones only) in a graph, and its copies to the host."""
    run = _pass_of(case, make(case, kind))
    with on_side_stream():
        for _ in range(WARM_UP):
            run()
    found = _measured(run)
    if kind != "grouped":
        return found
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    same = all(map(torch.equal, captured, run()))
    return {**_measured(graph.replay), "eager": found, "same": same}


def _measured(call: Callable[[], object]) -> Answer:
    walls = [wall_ms(call) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
    work = device_work(call, repeats=PROFILED)
    return {
        "walls": walls,
        "kernels": sum(item.us for item in work) / PROFILED / 1e3,
        "copies": sum(TO_HOST in item.name for item in work),
    }


def measure_roundings(case: ExpertCase) -> Answer:
    """How far grouped experts are from `SequentialMLP` with the same weights, relative to the norms."""
    theirs, ours = make(case, "SequentialMLP"), make(case, "grouped")
    ours.load_state_dict(theirs.state_dict())
    found = {}
    (out, grad, router, *grads), (its, its_grad, its_router, *its_grads) = (
        _pass_of(case, layer)() for layer in (ours, theirs)
    )
    stacked = [torch.stack(its_grads[index::2]) for index in range(2)]
    pairs = {
        "output": (out, its),
        "gradient of the rows": (grad, its_grad),
        "gradient of the router": (router, its_router),
        "gradient of the first projections": (grads[0], stacked[0]),
        "gradient of the second projections": (grads[1], stacked[1]),
    }
    for name, (one, other) in pairs.items():
        one, other = one.float(), other.float()
        found[name] = float((one - other).norm() / other.norm())
    return found
