# SPDX-License-Identifier: Apache-2.0
"""The scopes of a mixture of experts: `moe`, and `moe_router` and `moe_preprocess`, whose experts stay eager.

| scope | enters | runs | leaves |
|---|---|---|---|
| `moe` | hidden states after attention; padding mask | norm, router, experts, residual | hidden states |
| `moe_router` | the same | norm, router, losses, counts, shared experts | see below |
| `moe_preprocess` | what leaves the router | permutation of rows and probabilities | see below |
| behind them, eager | what leaves them | dispatch, experts, combine, sums, residual | hidden states |

Experts are in a graph where each gets as many rows in each micro-batch, and where they do not wait for the
device (megagraph/megatron/grouped_experts.py).

What leaves `moe_router` is, in this order: normed hidden states, probabilities [rows, experts], the routing
map of their shape, the output of the shared experts if there are any, hidden states as they entered. Shared
experts that overlap with the dispatch run there, and nothing of them leaves here. Where attention is graphed
too, both are one site. Losses are added to Megatron's metrics, which no module owns.

What leaves `moe_preprocess` is: permuted rows [most, H], their probabilities [most], the place that each of
them has among the rows [most], all probabilities [rows, experts] without a gradient, the routing map, normed
hidden states where shared experts overlap with the dispatch, else the output of the shared experts if there
are any, hidden states as they entered. `most` is as many as there may be: rows x top-k, or what all experts
take where they are padded to a capacity. Sorting puts those that are routed first, in the order of eager.
Counts and splits, whatever waits for the device or goes over ranks, and the cut to the routed rows are part
of the eager part behind it, where Megatron's dispatcher preprocesses as ever, but is handed these rows in
place of its own permutation (`wrap_permutation()`). So its attributes are those of eager. A
dispatcher that gathers all rows permutes behind its dispatch: there the scope adds nothing to the router's.

Layers of experts keep tensors of a call with their history beyond its end, and set them anew in the next one.
Where a step raised its backward will not come, and such a tensor would keep a slot until then.

Metrics that a host replaces between steps are memory that has moved; the old ones are held until then, since
graphs add to them. Experts that are padded have a capacity of the canonical pack's rows, so that nothing in
their graph depends on what was routed where.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.bank.sites import Outputs
from megagraph.config import graph_modules
from megagraph.megatron import seams
from megagraph.megatron.grouped_experts import is_grouped
from megagraph.megatron.scopes.parts import MLP, Front, LayerPart, Run, experts_of, in_mlp, run_mlp

__all__ = [
    *("DISPATCHED", "EXPERTS", "MOE", "PERMUTED", "PREPROCESS", "ROUTED", "ROUTER", "UNROUTED"),
    *("drop_history", "forget_calls", "has_forced_routing", "has_grouped", "is_freed", "let_go_of"),
    *("make_scale", "read_by_routers", "recomputes", "take_permuted"),
    "unsupported_routing",
]


def read_by_routers(layer: Any) -> Sequence[Tensor]:
    """The tensors that graphs of a layer's router write and read; those of all routers."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    return [*seams.moe_metrics().values(), *(() if scale is None else (scale,))]


def make_scale(block: nn.Module) -> None:
    """Sets the scale of routers' losses to one where nobody has, in the shape that schedules copy to it.

    A backward would make one without dimensions, to which they cannot.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import Router

    router: Any = next((module for module in block.modules() if isinstance(module, Router)), None)
    if router is not None and MoEAuxLossAutoScaler.main_loss_backward_scale is None:
        MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1, device=router.weight.device)


UNROUTED = "_megagraph_routes_fewer"  # an attribute of maps that may route rows to no expert


def _late_shared(layer: Any) -> None:
    layer.mlp.backward_dw(routed_experts=False, shared_experts=True)


def let_go_of(mixture: Any) -> Callable[[], None]:
    """Before a dispatch. Returns what is called behind its combine: nobody keeps its tensors any longer.

    Those that leave a graph would keep their slot from the next micro-batch. That is what a dispatcher does,
    and shared experts beside it where an error comes up.
    """
    takers = (taker for taker in (mixture.token_dispatcher, mixture.shared_experts) if taker is not None)
    before = [(vars(taker), dict(vars(taker))) for taker in takers]

    def let_go() -> None:
        for now, kept in before:
            for name, value in now.items():
                if isinstance(value, Tensor) and value is not kept.get(name):
                    now[name] = None

    return let_go


def _run_whole(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Any:
    with contextlib.ExitStack() as afterwards:
        afterwards.callback(let_go_of(layer.mlp))
        return run_mlp(layer, hidden_states, arguments)


EXPERTS = LayerPart(
    name="experts",
    is_in=lambda layer: experts_of(layer) is not None,
    run=_run_whole,
    late=_late_shared,
    check=lambda layer: "its experts wait for the device, and nothing else of it can be graphed",
)


def has_forced_routing(router: Any) -> bool:
    """Whether somebody may tell a router what to choose, or sees it: a replay, or routing of a host's."""
    return getattr(router, "router_replay", None) is not None or seams.is_replaced(router, seams.ROUTING)


def recomputes(config: Any, module: str) -> bool:
    """Whether layers run that part of theirs again in the backward pass: `recompute_modules` names it."""
    is_selective = getattr(config, "recompute_granularity", None) == "selective"
    return is_selective and module in (getattr(config, "recompute_modules", None) or ())


def unsupported_routing(layer: Any) -> str | None:
    """Why the router of a layer must be in no graph: somebody may tell it what to choose."""
    if not has_forced_routing(layer.mlp.router) and seams.replaced_choice() is None:
        return None
    return "its router may be told what to choose, of which a graph would not hear; name 'attn' alone"


def has_grouped(layer: nn.Module) -> bool:
    """Whether the experts of a layer never wait for the device."""
    return is_grouped(experts_of(layer))


def _unsupported_whole(layer: Any) -> str | None:
    if (why := unsupported_routing(layer)) is not None or has_grouped(layer):
        return why
    config, dispatcher = layer.config, layer.config.moe_token_dispatcher_type
    instead = "or name 'moe_router' in cuda_graph_modules instead of 'moe'"
    if dispatcher != "alltoall":
        return f"the dispatcher {dispatcher!r} counts rows on the host; write 'alltoall', {instead}"
    if config.expert_model_parallel_size > 1:
        return f"its experts are spread over ranks, which run other packs; hold them on one rank, {instead}"
    if recomputes(config, "moe"):
        # What runs the experts again leaves tensors of the graph in their dispatcher.
        return "'moe' with 'moe' in recompute_modules is not supported yet; leave that out, or name 'attn'"
    if config.moe_shared_expert_overlap:
        return f"'moe' with moe_shared_expert_overlap=True is not supported yet; leave that out, {instead}"
    return None


MOE = LayerPart(name="moe", run=_run_whole, children=MLP.children, routes=True, check=_unsupported_whole)


def _preprocess(layer: Any, before: Sequence[Tensor]) -> Front:
    """What comes between a router and the dispatch."""
    normed, probs, routing_map, *shared, residual = before
    setattr(routing_map, UNROUTED, True)
    hidden, probs = layer.mlp.preprocess(normed, probs, routing_map)
    return hidden, probs, shared[0] if shared else None, residual


def _behind(front: Callable[[Any, Sequence[Tensor]], Front]) -> Run:
    """All of a layer behind its router, in one."""

    def run(layer: Any, before: Sequence[Tensor], arguments: Mapping[str, Any]) -> Any:
        mixture = layer.mlp
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(let_go_of(mixture))
            hidden, probs, shared, residual = front(layer, before)
            hidden, probs = mixture.dispatch(hidden, probs)
            hidden, bias = mixture.routed_experts_compute(hidden, probs)
            hidden = mixture.postprocess(mixture.combine(hidden), shared)
        return layer._forward_post_mlp((hidden, bias), residual)

    return in_mlp(run)


ROUTED = LayerPart(name="routed experts", run=_behind(_preprocess), front=_preprocess)


# Of releases since 0.19: keeps hidden states from the norm of an MLP to its end, to offload them, which is
# refused. They would be a graph's, and keep its memory until the next call.
_OFFLOADS = "mlp_norm_manager"


def _run_router(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Outputs:
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


def _place_of_shared(layer: Any, place: int) -> Sequence[int]:
    """Where the output of the shared experts is among what leaves a part, if it is."""
    mixture = layer.mlp
    return (place,) if mixture.use_shared_expert and not mixture.shared_expert_overlap else ()


def _replaced(*methods: tuple[Any, seams.Seam]) -> str | None:
    """Why a layer's router cannot run alone: one of the methods that have to be run in parts is a host's."""
    found = next((seam for module, seam in methods if seams.is_replaced(module, seam)), None)
    why = "is not Megatron's, so that its router cannot run alone"
    return None if found is None else f"its {found.path} {why}"


ROUTER = LayerPart(
    name="moe_router",
    run=in_mlp(_run_router),
    children=lambda layer: (
        *("pre_mlp_layernorm", "mlp.router"),
        *(() if layer.mlp.shared_expert_overlap else ("mlp.shared_experts",)),
    ),
    transient=lambda layer: _place_of_shared(layer, 3),
    routes=True,
    late=_late_shared,
    check=lambda layer: (
        _replaced((layer, seams.MLP_FORWARD), (layer.mlp, seams.EXPERT_FORWARD)) or unsupported_routing(layer)
    ),
)


# What the preprocessing that runs is to hand out; None once it has.
_ready: contextvars.ContextVar[Sequence[Tensor] | None] = contextvars.ContextVar("permuted", default=None)


def take_permuted() -> Sequence[Tensor] | None:
    """Rows [most, H], probabilities [most] and places [most] that were permuted already, once; else None."""
    permuted = _ready.get()
    _ready.set(None)
    return permuted


def _most_routed(dispatcher: Any, rows: int) -> int:
    """How many of a pack's rows may be routed by a dispatcher that permutes before its dispatch."""
    from megatron.core.transformer.moe.moe_utils import get_capacity

    topk: int = dispatcher.config.moe_router_topk
    if not dispatcher.drop_and_pad:
        return rows * topk
    experts, factor = dispatcher.num_experts, dispatcher.moe_expert_capacity_factor
    of_each = get_capacity(num_tokens=rows * topk, num_experts=experts, capacity_factor=factor)
    return int(experts * of_each)


def _permute(layer: Any, before: Sequence[Tensor], arguments: Mapping[str, Any]) -> Outputs:
    normed, probs, routing_map, *shared, residual = before
    dispatcher = layer.mlp.token_dispatcher
    permuted = seams.PERMUTATION.function()(
        normed.view(-1, normed.size(-1)),
        routing_map,
        probs=probs,
        num_out_tokens=_most_routed(dispatcher, routing_map.size(0)),
        fused=False,
        drop_and_pad=dispatcher.drop_and_pad,
    )
    overlapped = () if dispatcher.shared_experts is None else (normed,)
    return [*permuted[:3], probs.detach(), routing_map, *overlapped, *shared, residual]


DISPATCHED = (0, 1)  # among what leaves `moe_preprocess`: rows and their probabilities


def is_freed(layer: Any) -> bool:
    """Whether a node of a plan frees what it has dispatched, as Megatron asks its own graphs' options."""
    own = (getattr(layer.config, option, None) for option in ("cuda_graph_modules", "cuda_graph_scope"))
    return not any(PREPROCESS.name in graph_modules(named) for named in own)


def _copied_or_shared(layer: Any) -> Sequence[int]:
    """Rows, their probabilities and the output of the shared experts, as far as nothing saves them."""
    dispatcher = layer.mlp.token_dispatcher
    # Whatever sorts them by expert, or sends them to other ranks, copies them; else experts save them.
    sorts = dispatcher.num_local_experts > 1 and not dispatcher.drop_and_pad
    permuted = DISPATCHED if sorts or dispatcher.ep_size > 1 else ()
    return (*permuted, *_place_of_shared(layer, 5))


_LEAVE_OUT = "leave 'moe_preprocess' out of cuda_graph_modules"
# Options, off by default.
_UNSUPPORTED = (
    *("moe_permute_fusion", "moe_latent_size"),
    *("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
)


def _unsupported_preprocess(layer: Any) -> str | None:
    from megatron.core.transformer.identity_op import IdentityOp

    if (why := _replaced((layer.mlp, seams.EXPERT_PREPROCESS))) is not None:
        return why
    config, dispatcher = layer.config, layer.mlp.token_dispatcher
    for option in _UNSUPPORTED:
        if value := getattr(config, option, None):
            return f"'moe_preprocess' with {option}={value!r} is not supported yet; {_LEAVE_OUT}"
    if not dispatcher.drop_and_pad and not seams.permutation_sorts():
        return f"this release of megatron-core permutes into shapes that only the device knows; {_LEAVE_OUT}"
    if dispatcher.shared_experts is not None and isinstance(layer.pre_mlp_layernorm, IdentityOp):
        # Normed hidden states are the residual then: their gradients would be summed in another order.
        return f"shared experts that overlap without a norm before them are not supported yet; {_LEAVE_OUT}"
    if seams.is_replaced(dispatcher, seams.DISPATCH_PREPROCESS):
        return f"its dispatcher's dispatch_preprocess is not Megatron's; {_LEAVE_OUT}"
    return None


PREPROCESS = LayerPart(
    name="moe_preprocess",
    is_in=lambda layer: isinstance(  # permutes before its dispatch
        getattr(experts_of(layer), "token_dispatcher", None), seams.DISPATCH_PREPROCESS.owner()
    ),
    run=in_mlp(_permute),
    transient=_copied_or_shared,
    check=_unsupported_preprocess,
)


def _preprocess_permuted(layer: Any, before: Sequence[Tensor]) -> Front:
    """The same of rows that were permuted already: the dispatcher takes these, and permutes nothing."""
    rows, of_rows, places, probs, routing_map, *further, residual = before
    # Where nothing else reads normed hidden states, only their shape is asked for.
    normed = residual if layer.mlp.token_dispatcher.shared_experts is None else further.pop(0)
    token = _ready.set((rows, of_rows, places))
    try:
        front = _preprocess(layer, (normed, probs, routing_map, *further, residual))
        if _ready.get() is not None:
            raise RuntimeError("the dispatcher has permuted rows by another function than Megatron's")
        return front
    finally:
        _ready.reset(token)


PERMUTED = LayerPart(name="permuted experts", run=_behind(_preprocess_permuted), front=_preprocess_permuted)


def forget_calls(layers: Iterable[nn.Module]) -> None:
    """Drops what layers keep of their calls. Call it where no backward is to come."""
    for layer in layers:
        if vars(layer).get(_OFFLOADS) is not None:
            setattr(layer, _OFFLOADS, None)
        dispatcher = getattr(experts_of(layer), "token_dispatcher", None)
        if dispatcher is not None:
            drop_history(dispatcher)


def drop_history(owner: object) -> None:
    """Sets attributes that are tensors with a history to None."""
    attributes = vars(owner)
    for name, value in attributes.items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            attributes[name] = None
