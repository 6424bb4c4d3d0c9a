# SPDX-License-Identifier: Apache-2.0
"""Routes rows of padding to no expert, in place of Megatron's routing.

Megatron keeps rows that a padding mask names out of losses, and routes them like all others. Acts in models
that are not refused, and only if routers are given a mask.

Rows of padding are taken out between the choice of experts and the dropping of tokens (docs/decisions.md). So
they are counted for no bias either, and reach no dispatcher; one that counts on `topk` experts for every row
is told how many there are.
"""

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megagraph.megatron.graphs.dispatcher import MicroBatch
from megagraph.megatron.plugin import Plugin
from megagraph.megatron.scopes import moe
from megagraph.megatron.seams import ROUTING, is_replaced, permutation_sorts

__all__ = [
    *("wrap_choice", "wrap_expert_bias", "wrap_permutation", "wrap_permuted_rows"),
    *("wrap_router", "wrap_routing"),
]


# Rows of padding of the routing that runs, bool [rows, 1].
_padding: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("padding", default=None)


def wrap_router(plugin: Plugin, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `TopKRouter.forward`: a router that is told what to choose, or recorded, has the rows given.

    That is how many its host has choices for, or wants; the others reach no expert. Routing of a host's gets
    the mask that was given, too, or none; Megatron's that of the canonical pack's first rows.
    """

    def forward(router: Any, input: Tensor, padding_mask: Tensor | None = None, **further: Any) -> Any:
        graphs = plugin.graphs_around(router) if moe.has_forced_routing(router) else None
        batch = None if graphs is None else graphs.running
        if not isinstance(batch, MicroBatch) or batch.is_as_given:
            return original(router, input, padding_mask, **further)
        if moe.recomputes(router.config, "moe") or router.config.sequence_parallel:
            raise RuntimeError(
                "expected no 'moe' in recompute_modules, and no sequence parallelism, if routing is "
                "replayed or a host's; without them, or with routers that are told so before the model's "
                "first call, training goes on"
            )
        rows, added = batch.tokens, input.size(0) - batch.tokens
        if is_replaced(router, ROUTING):
            padding_mask = None if batch.mask is None else batch.mask.transpose(0, 1)
        elif padding_mask is not None:
            padding_mask = padding_mask[:rows]
        routed = original(router, input[:rows], padding_mask, **further)
        if added:
            routed = tuple(functional.pad(each, (0, 0, 0, added)) for each in routed)
            setattr(routed[1], moe.UNROUTED, True)
        return routed

    return forward


def wrap_routing(plugin: Plugin, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `TopKRouter.routing`: makes the mask known to the choice of experts inside."""

    def routing(router: Any, logits: Tensor, padding_mask: Tensor | None = None, **further: Any) -> Any:
        if padding_mask is None or plugin.graphs_around(router) is None:
            return original(router, logits, padding_mask=padding_mask, **further)
        token = _padding.set(padding_mask.reshape(-1, 1))
        try:
            probs, routing_map = original(router, logits, padding_mask=padding_mask, **further)
        finally:
            _padding.reset(token)
        setattr(routing_map, moe.UNROUTED, True)
        return probs, routing_map

    return routing


def wrap_choice(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the choice of experts: none for rows of padding, before any are dropped."""

    def topk_routing_with_score_function(*args: Any, **kwargs: Any) -> Any:
        probs, chosen = original(*args, **kwargs)
        if (padding := _padding.get()) is not None:
            return probs.masked_fill(padding, 0), chosen & ~padding
        return probs, chosen

    return topk_routing_with_score_function


def wrap_expert_bias(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the count for the bias of experts in every model: it takes the mask for theirs, and raises."""

    def _apply_expert_bias(router: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        padding = None if padding_mask is None else padding_mask.reshape(-1, 1)
        original(router, routing_map, padding_mask=padding)

    return _apply_expert_bias


def wrap_permuted_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `preprocess` of the alltoall dispatcher, which counts every row `topk` times."""

    def preprocess(dispatcher: Any, routing_map: Tensor) -> Any:
        counts = original(dispatcher, routing_map)
        is_constant = not isinstance(dispatcher.num_out_tokens, torch.Tensor)
        if hasattr(routing_map, moe.UNROUTED) and is_constant and not dispatcher.drop_and_pad:
            # As Megatron does if tokens are dropped.
            dispatcher.num_out_tokens = routing_map.sum()
            dispatcher._maybe_update_cuda_sync_point("before_permutation_1")
        return counts

    return preprocess


def wrap_permutation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `permute`: hands out what a graph has permuted, as many rows as are routed."""
    further = (None, None) if permutation_sorts() else ()

    def permute(*args: Any, num_out_tokens: Any = None, **options: Any) -> Any:
        permuted = moe.take_permuted()
        if permuted is None:
            return original(*args, num_out_tokens=num_out_tokens, **options)
        if (count := int(num_out_tokens)) != permuted[0].size(0):
            permuted = [each[:count] for each in permuted]
        return *permuted, *further

    return permute
