# SPDX-License-Identifier: Apache-2.0
"""The scopes of a mixture of experts: `moe`, and `moe_router`, whose experts stay eager.

| scope | enters | runs | leaves |
|---|---|---|---|
| `moe` | hidden states after attention; padding mask | norm, router, experts, residual | hidden states |
| `moe_router` | the same | norm, router, losses, counts, shared experts | see below |
| behind `moe_router`, eager | what leaves it | dispatch, experts, combine, sums, residual | hidden states |

Experts are in a graph where each gets as many rows in each micro-batch, and where they do not wait for the
device (megagraph/megatron/grouped_experts.py).

What leaves `moe_router` is, in this order: normed hidden states, probabilities [rows, experts], the routing
map of their shape, the output of the shared experts if there are any, hidden states as they entered. Shared
experts that overlap with the dispatch run there, and nothing of them leaves here. Where attention is graphed
too, both are one site. Losses are added to Megatron's metrics, which no module owns.

Layers of experts keep tensors of a call with their history beyond its end, and set them anew in the next one.
Where a step raised its backward will not come, and such a tensor would keep a slot until then.

Metrics that a host replaces between steps are memory that has moved; the old ones are held until then, since
graphs add to them. A layer whose `_forward_mlp`, or whose experts' forward, is not Megatron's is not taken
apart: nobody knows what that does between the parts. Experts that are padded have a capacity of the canonical
pack's rows, so that nothing in their graph depends on what was routed where.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.bank.sites import Outputs
from megagraph.megatron.grouped_experts import is_grouped
from megagraph.megatron.scopes.parts import LayerPart, run_mlp
from megagraph.megatron.seams import EXPERT_FORWARD, MLP_FORWARD, ROUTING, is_replaced, moe_metrics

__all__ = [
    "EXPERTS",
    "GROUPED",
    "MOE",
    "ROUTED",
    "ROUTER",
    "drop_history",
    "experts_of",
    "forget_calls",
    "has_forced_routing",
    "make_scale",
    "mark_unrouted",
    "may_have_unrouted",
    "new_metrics_are_empty",
    "read_by_routers",
    "recomputes_experts",
    "run_experts",
    "unsupported_routing",
]


def read_by_routers(layer: Any) -> Sequence[Tensor]:
    """The tensors that graphs of a layer's router write and read; those of all routers."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    return [*moe_metrics().values(), *(() if scale is None else (scale,))]


def make_scale(block: nn.Module) -> None:
    """Sets the scale of routers' losses to one where nobody has, in the shape that schedules copy to it.

    A backward would make one without dimensions, to which they cannot.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import Router

    router: Any = next((module for module in block.modules() if isinstance(module, Router)), None)
    if router is not None and MoEAuxLossAutoScaler.main_loss_backward_scale is None:
        MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1, device=router.weight.device)


@contextlib.contextmanager
def new_metrics_are_empty() -> Iterator[None]:
    """Around work that is to leave no trace: metrics that come up inside hold zeros afterwards."""
    before = set(moe_metrics())
    try:
        yield
    finally:
        for name, values in moe_metrics().items():
            if name not in before:
                values.zero_()


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


EXPERTS = LayerPart(
    name="experts",
    core="mlp",
    children=("pre_mlp_layernorm", "mlp", "mlp_bda"),
    run=run_mlp,
    accepts=lambda layer: experts_of(layer) is not None,
    always_eager=(
        "its experts wait for the device; write cuda_graph_modules = ['attn'] to graph its attention, "
        "['attn', 'moe_router'] to graph its router too"
    ),
)


def has_forced_routing(router: Any) -> bool:
    """Whether somebody may tell a router what to choose, or sees it: a replay, or routing of a host's."""
    return getattr(router, "router_replay", None) is not None or is_replaced(router, ROUTING)


def recomputes_experts(config: Any) -> bool:
    """Whether layers of experts run again in the backward pass, with their routers."""
    is_selective = getattr(config, "recompute_granularity", None) == "selective"
    return is_selective and "moe" in (config.recompute_modules or ())


def unsupported_routing(layer: Any) -> str | None:
    """Why the router of a layer must be in no graph: somebody may tell it what to choose."""
    if not has_forced_routing(layer.mlp.router):
        return None
    return "its router may be told what to choose, of which a graph would not hear; name 'attn' alone"


GROUPED = LayerPart(
    name="moe",
    core="mlp",
    children=EXPERTS.children,
    run=run_mlp,
    state=read_by_routers,
    accepts=lambda layer: is_grouped(experts_of(layer)),
    check=unsupported_routing,
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


def _unsupported_whole(layer: Any) -> str | None:
    if (why := unsupported_routing(layer)) is not None:
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


MOE = LayerPart(
    name="moe",
    core="mlp",
    children=EXPERTS.children,
    run=_run_whole,
    state=read_by_routers,
    accepts=EXPERTS.accepts,
    check=_unsupported_whole,
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


ROUTED = LayerPart(
    name="routed experts",
    core="mlp",
    children=("mlp", "mlp_bda"),
    run=_run_routed,
    accepts=EXPERTS.accepts,
)


_SHARED = 3  # their place among what leaves
# Of later releases: offloads the norm's input after the experts, which is refused. It would keep hidden
# states of a graph, and with them its memory, until the next call.
_OFFLOADS = "mlp_norm_manager"


def _run(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Outputs:
    mixture, mask = layer.mlp, arguments.get("padding_mask")
    normed, residual = layer._forward_pre_mlp_layernorm(hidden_states), hidden_states
    if hasattr(layer, _OFFLOADS):
        setattr(layer, _OFFLOADS, None)
    if isinstance(normed, tuple):  # a norm that adds, too
        normed, residual = normed
    shared = mixture.shared_experts_compute(normed)
    probs, routing_map = mixture.route(normed, None if mask is None else mask.transpose(0, 1))
    leaving = (normed, probs, routing_map, shared, residual)
    # The site's own input lies where the next micro-batch's will.
    is_own = hidden_states.is_leaf
    return [
        tensor.clone() if is_own and tensor is hidden_states else tensor
        for tensor in leaving
        if tensor is not None
    ]


def _transient(layer: Any) -> Sequence[int]:
    mixture = layer.mlp
    return (_SHARED,) if mixture.use_shared_expert and not mixture.shared_expert_overlap else ()


def _elsewhere(layer: Any) -> Sequence[str]:
    return ("mlp.shared_experts",) if layer.mlp.shared_expert_overlap else ()


ROUTER = LayerPart(
    name="moe_router",
    core="mlp",
    children=("pre_mlp_layernorm", "mlp.router", "mlp.shared_experts"),
    run=_run,
    elsewhere=_elsewhere,
    bypassed=("mlp",),
    in_parts={"": MLP_FORWARD, "mlp": EXPERT_FORWARD},
    transient=_transient,
    state=read_by_routers,
    accepts=lambda layer: experts_of(layer) is not None,
    check=unsupported_routing,
)


_OF_LAYERS = "mlp_norm_manager"  # keeps hidden states from the norm of an MLP to its end; since 0.19


def forget_calls(layers: Iterable[nn.Module]) -> None:
    """Drops it. Call it where no backward is to come."""
    for layer in layers:
        if vars(layer).get(_OF_LAYERS) is not None:
            setattr(layer, _OF_LAYERS, None)
        dispatcher = getattr(experts_of(layer), "token_dispatcher", None)
        if dispatcher is not None:
            drop_history(dispatcher)


def drop_history(owner: object) -> None:
    """Sets attributes that are tensors with a history to None."""
    attributes = vars(owner)
    for name, value in attributes.items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            attributes[name] = None
