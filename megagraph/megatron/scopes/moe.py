# SPDX-License-Identifier: Apache-2.0
"""Scope: the experts of a layer with their router, norm and residual.

| enters | runs | leaves |
|---|---|---|
| hidden states after attention; padding mask | norm, router, experts, residual | hidden states |

They are in a graph, as scope `moe`, where each expert gets as many rows in each micro-batch, and where they
do not wait for the device (megagraph/megatron/grouped_experts.py); else they stay eager. With `moe_router`
(megagraph/megatron/scopes/moe_router.py) they are two, and the second stays eager:

| enters | runs | leaves |
|---|---|---|
| what leaves the router | dispatch, experts, combine, shared experts added, residual | hidden states |
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megagraph.megatron.grouped_experts import is_grouped
from megagraph.megatron.scopes.halves import Half
from megagraph.megatron.scopes.metrics import read_by_routers
from megagraph.megatron.scopes.mlp import run_mlp
from megagraph.megatron.seams import ROUTING, is_replaced

__all__ = [
    "EXPERTS",
    "GROUPED",
    "MOE",
    "ROUTED",
    "experts_of",
    "is_told",
    "mark_unrouted",
    "may_have_unrouted",
    "recomputes_experts",
    "run_experts",
    "why_not_routed",
]

_MARK = "_megagraph_routes_fewer"  # of a map that routes some rows to no expert


def mark_unrouted(routing_map: Tensor) -> None:
    """Remembers of a map, bool [rows, experts], that it may route rows to no expert."""
    setattr(routing_map, _MARK, True)


def may_have_unrouted(routing_map: Tensor) -> bool:
    """Whether that is remembered."""
    return hasattr(routing_map, _MARK)


def experts_of(layer: nn.Module) -> Any:
    """The MoELayer of a transformer layer, of Megatron's class or derived from it; None where it has none."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    mlp = getattr(layer, "mlp", None)
    return mlp if isinstance(mlp, BaseMoELayer) else None


EXPERTS = Half(
    name="experts",
    core="mlp",
    children=("pre_mlp_layernorm", "mlp", "mlp_bda"),
    run=run_mlp,
    accepts=lambda layer: experts_of(layer) is not None,
    why_eager=(
        "its experts wait for the device; write cuda_graph_modules = ['attn'] to graph its attention, "
        "['attn', 'moe_router'] to graph its router too"
    ),
)


def is_told(router: Any) -> bool:
    """Whether somebody may tell a router what to choose, or sees it: a replay, or routing of a host's."""
    return getattr(router, "router_replay", None) is not None or is_replaced(router, ROUTING)


def recomputes_experts(config: Any) -> bool:
    """Whether layers of experts run again in the backward pass, with their routers."""
    is_selective = getattr(config, "recompute_granularity", None) == "selective"
    return is_selective and "moe" in (config.recompute_modules or ())


def why_not_routed(layer: Any) -> str | None:
    """Why the router of a layer must be in no graph: somebody may tell it what to choose."""
    if not is_told(layer.mlp.router):
        return None
    return "its router may be told what to choose, of which a graph would not hear; name 'attn' alone"


GROUPED = Half(
    name="moe",
    core="mlp",
    children=EXPERTS.children,
    run=run_mlp,
    state=read_by_routers,
    accepts=lambda layer: is_grouped(experts_of(layer)),
    why_not=why_not_routed,
)


@contextlib.contextmanager
def _letting_go(mixture: Any) -> Iterator[None]:
    """Around a dispatch and its combine: keeps whoever takes part from keeping tensors until the next call.

    Those that leave a graph would keep their slot from the next micro-batch. That is what a dispatcher does,
    and shared experts beside it where an error comes up.
    """
    takers = (taker for taker in (mixture.token_dispatcher, mixture.shared_experts) if taker is not None)
    before = [(vars(taker), dict(vars(taker))) for taker in takers]
    try:
        yield
    finally:
        for now, kept in before:
            for name, value in now.items():
                if isinstance(value, Tensor) and value is not kept.get(name):
                    now[name] = None


def _run_whole(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    with _letting_go(layer.mlp):
        return run_mlp(layer, hidden_states, arguments)


def _why_not_whole(layer: Any) -> str | None:
    if (why := why_not_routed(layer)) is not None:
        return why
    config, dispatcher = layer.config, layer.config.moe_token_dispatcher_type
    instead = "or name 'moe_router' in cuda_graph_modules instead of 'moe'"
    if dispatcher != "alltoall":
        return f"the dispatcher {dispatcher!r} counts rows on the host; write 'alltoall', {instead}"
    if config.expert_model_parallel_size > 1:
        return f"its experts are spread over ranks, which run other packs; hold them on one rank, {instead}"
    if recomputes_experts(config):
        # What runs the experts again leaves tensors of the graph in their dispatcher.
        return f"'moe' with 'moe' in recompute_modules is not supported yet; leave that out, {instead}"
    if config.moe_shared_expert_overlap:
        return f"'moe' with moe_shared_expert_overlap=True is not supported yet; leave that out, {instead}"
    return None


MOE = Half(
    name="moe",
    core="mlp",
    children=EXPERTS.children,
    run=_run_whole,
    state=read_by_routers,
    accepts=EXPERTS.accepts,
    why_not=_why_not_whole,
)


def run_experts(
    layer: Any,
    routed: tuple[Tensor, Tensor, Tensor],
    shared: Tensor | None,
    residual: Tensor,
    preprocessing: contextlib.AbstractContextManager[None],
) -> Tensor:
    """All of a layer that comes behind its router.

    Args:
        layer: a TransformerLayer with experts.
        routed: normed hidden states, probabilities and the routing map.
        shared: the output of the shared experts, or None.
        residual: hidden states as they entered the norm.
        preprocessing: entered around what comes before the dispatch.
    """
    mixture = layer.mlp
    mark_unrouted(routed[2])
    with _letting_go(mixture):
        with preprocessing:
            hidden, probs = mixture.preprocess(*routed)
        hidden, probs = mixture.dispatch(hidden, probs)
        hidden, bias = mixture.routed_experts_compute(hidden, probs)
        hidden = mixture.postprocess(mixture.combine(hidden), shared)
    out: Tensor = layer._forward_post_mlp((hidden, bias), residual)
    return out


def _run_routed(layer: Any, before: Sequence[Tensor], arguments: Mapping[str, Any]) -> Tensor:
    normed, probs, routing_map, *shared, residual = before
    routed = normed, probs, routing_map
    return run_experts(layer, routed, shared[0] if shared else None, residual, contextlib.nullcontext())


ROUTED = Half(
    name="routed experts",
    core="mlp",
    children=("mlp", "mlp_bda"),
    run=_run_routed,
    accepts=EXPERTS.accepts,
)
