# SPDX-License-Identifier: Apache-2.0
"""Scope: what comes before the dispatch of a mixture of experts, which stays eager with the experts.

| enters | runs | leaves |
|---|---|---|
| hidden states after attention; padding mask | norm, router, losses, counts, shared experts | see below |

What leaves is, in this order: normed hidden states, probabilities [rows, experts], the routing map of their
shape, the output of the shared experts if there are any, hidden states as they entered.

Shared experts that overlap with the dispatch run there, and nothing of them leaves here. Where attention is
graphed too, both are one site. Losses are added to Megatron's metrics, which no module owns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megagraph.bank.sites import Outputs
from megagraph.megatron.scopes.halves import Half
from megagraph.megatron.scopes.metrics import read_by_routers
from megagraph.megatron.scopes.moe import experts_of, why_not_routed
from megagraph.megatron.seams import EXPERT_FORWARD, MLP_FORWARD

__all__ = ["ROUTER"]

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


ROUTER = Half(
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
    why_not=why_not_routed,
)
