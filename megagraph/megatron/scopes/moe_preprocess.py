# SPDX-License-Identifier: Apache-2.0
"""Scope: the permutation of rows to their experts, which goes on where the router ends.

| enters | runs | leaves |
|---|---|---|
| what leaves the router | permutation of rows and probabilities | see below |

What leaves is, in this order: permuted rows [most, H], their probabilities [most], the place that each of
them has among the rows [most], all probabilities [rows, experts] without a gradient, the routing map, normed
hidden states where shared experts overlap with the dispatch, else the output of the shared experts if there
are any, hidden states as they entered. `most` is as many as there may be: rows x top-k, or what all experts
take where they are padded to a capacity. Sorting puts those that are routed first, in the order of eager.

Counts and splits, whatever waits for the device or goes over ranks, and the cut to the routed rows are part
of the eager part behind it, where Megatron's dispatcher preprocesses as ever, but is handed these rows in
place of its own permutation (`ExpertWrappers.permutation()`). So its attributes are those of eager. A
dispatcher that gathers all rows permutes behind its dispatch: there the scope adds nothing to the router's.

Buffers that the dispatcher copies on are transient: they are free again for what comes after it.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megagraph.bank.sites import Outputs
from megagraph.megatron.scopes.moe import experts_of, run_experts
from megagraph.megatron.scopes.parts import LayerPart
from megagraph.megatron.seams import (
    DISPATCH_PREPROCESS,
    EXPERT_PREPROCESS,
    PERMUTATION,
    is_replaced,
    permutation_sorts,
)

__all__ = ["PERMUTED", "PREPROCESS", "Permuted", "take_permuted"]

_ROWS, _PROBS, _SHARED = 0, 1, 5  # their places among what leaves
_LEAVE_OUT = "leave 'moe_preprocess' out of cuda_graph_modules"


@dataclass(frozen=True, kw_only=True)
class Permuted:
    """What a permutation has made, with room for all rows that may be routed.

    Args:
        rows: [most, H].
        probs: [most].
        places: of each among the rows that came in, int64 [most].
    """

    rows: Tensor
    probs: Tensor
    places: Tensor

    def first(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """As many of each."""
        all_of_them = self.rows, self.probs, self.places
        if count == self.rows.size(0):
            return all_of_them
        rows, probs, places = (each[:count] for each in all_of_them)
        return rows, probs, places


# What the preprocessing that runs is to hand out; empty once it has.
_ready: contextvars.ContextVar[list[Permuted] | None] = contextvars.ContextVar("permuted", default=None)


def take_permuted() -> Permuted | None:
    """What was permuted already, once; None where nothing was."""
    ready = _ready.get()
    return ready.pop() if ready else None


@contextlib.contextmanager
def _handing_out(permuted: Permuted) -> Iterator[None]:
    """Around a dispatcher's preprocessing: it permutes nothing, but takes what was permuted."""
    ready = [permuted]
    token = _ready.set(ready)
    try:
        yield
    finally:
        _ready.reset(token)
    if ready:
        raise RuntimeError("the dispatcher has permuted rows by another function than Megatron's")


def _most_routed(dispatcher: Any, rows: int) -> int:
    """How many of a pack's rows may be routed by a dispatcher that permutes before its dispatch."""
    from megatron.core.transformer.moe.moe_utils import get_capacity

    topk: int = dispatcher.config.moe_router_topk
    if not dispatcher.drop_and_pad:
        return rows * topk
    experts, factor = dispatcher.num_experts, dispatcher.moe_expert_capacity_factor
    of_each = get_capacity(num_tokens=rows * topk, num_experts=experts, capacity_factor=factor)
    return int(experts * of_each)


def _run(layer: Any, before: Sequence[Tensor], arguments: Mapping[str, Any]) -> Outputs:
    normed, probs, routing_map, *shared, residual = before
    dispatcher = layer.mlp.token_dispatcher
    permuted = PERMUTATION.function()(
        normed.view(-1, normed.size(-1)),
        routing_map,
        probs=probs,
        num_out_tokens=_most_routed(dispatcher, routing_map.size(0)),
        fused=False,
        drop_and_pad=dispatcher.drop_and_pad,
    )
    overlapped = () if dispatcher.shared_experts is None else (normed,)
    return [*permuted[:3], probs.detach(), routing_map, *overlapped, *shared, residual]


def _transient(layer: Any) -> Sequence[int]:
    mixture = layer.mlp
    dispatcher = mixture.token_dispatcher
    # Whatever sorts them by expert, or sends them to other ranks, copies them; else experts save them.
    sorts = dispatcher.num_local_experts > 1 and not dispatcher.drop_and_pad
    permuted = (_ROWS, _PROBS) if sorts or dispatcher.ep_size > 1 else ()
    shared = (_SHARED,) if mixture.use_shared_expert and not mixture.shared_expert_overlap else ()
    return (*permuted, *shared)


def _permutes_before_dispatch(layer: nn.Module) -> bool:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    mixture = experts_of(layer)
    return mixture is not None and isinstance(mixture.token_dispatcher, MoEAlltoAllTokenDispatcher)


# (config attribute, value that is fine)
_UNSUPPORTED = (
    ("moe_permute_fusion", False),
    ("moe_latent_size", None),
    ("moe_router_padding_for_quantization", False),
    ("moe_router_padding_for_fp8", False),
)


def _unsupported(layer: Any) -> str | None:
    from megatron.core.transformer.identity_op import IdentityOp

    config, dispatcher = layer.config, layer.mlp.token_dispatcher
    for attribute, fine in _UNSUPPORTED:
        value = getattr(config, attribute, fine)
        if value not in (fine, None):
            return f"'moe_preprocess' with {attribute}={value!r} is not supported yet; {_LEAVE_OUT}"
    if not dispatcher.drop_and_pad and not permutation_sorts():
        return f"this release of megatron-core permutes into shapes that only the device knows; {_LEAVE_OUT}"
    if dispatcher.shared_experts is not None and isinstance(layer.pre_mlp_layernorm, IdentityOp):
        # Normed hidden states are the residual then: their gradients would be summed in another order.
        return f"shared experts that overlap without a norm before them are not supported yet; {_LEAVE_OUT}"
    if is_replaced(dispatcher, DISPATCH_PREPROCESS):
        return f"its dispatcher's dispatch_preprocess is not Megatron's; {_LEAVE_OUT}"
    return None


PREPROCESS = LayerPart(
    name="moe_preprocess",
    core="mlp",
    children=(),
    run=_run,
    in_parts={"mlp": EXPERT_PREPROCESS},
    transient=_transient,
    accepts=_permutes_before_dispatch,
    check=_unsupported,
)


def _run_permuted(layer: Any, before: Sequence[Tensor], arguments: Mapping[str, Any]) -> Tensor:
    rows, of_rows, places, probs, routing_map, *further, residual = before
    # Where nothing else reads normed hidden states, only their shape is asked for.
    overlaps = layer.mlp.token_dispatcher.shared_experts is not None
    normed = further.pop(0) if overlaps else residual
    permuted = _handing_out(Permuted(rows=rows, probs=of_rows, places=places))
    shared = further[0] if further else None
    return run_experts(layer, (normed, probs, routing_map), shared, residual, permuted)


PERMUTED = LayerPart(
    name="permuted experts",
    core="mlp",
    children=("mlp", "mlp_bda"),
    run=_run_permuted,
    accepts=_permutes_before_dispatch,
)
