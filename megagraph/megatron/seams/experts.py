# SPDX-License-Identifier: Apache-2.0
"""Routers, dispatchers and layers of experts, and where their metrics are."""

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megagraph.megatron.seams.seam import Seam, below_ours, called_name, made_in

__all__ = [
    "DISPATCH_PREPROCESS",
    "EXPERT_BIAS",
    "EXPERT_CHOICE",
    "EXPERT_FORWARD",
    "EXPERT_PREPROCESS",
    "EXPERT_SEAMS",
    "MLP_FORWARD",
    "PERMUTATION",
    "PERMUTED_ROWS",
    "ROUTER_FORWARD",
    "ROUTING",
    "SAVING_GROUP",
    "metric_group",
    "moe_metrics",
    "permutation_sorts",
    "replaced_choice",
    "router_losses_count_ranks",
    "set_metric_group",
]

_ROUTER_MODULE = "megatron.core.transformer.moe.router"
ROUTING = Seam(module=_ROUTER_MODULE, path="TopKRouter.routing", parameters=("logits", "padding_mask"))
# What routers that are told what to choose are called through.
ROUTER_FORWARD = Seam(module=_ROUTER_MODULE, path="TopKRouter.forward", parameters=("input", "padding_mask"))
_ROUTER_LOSSES = Seam(
    module=_ROUTER_MODULE,
    path="TopKRouter.attach_and_log_load_balancing_loss",
    parameters=("activation", "aux_loss_coeff", "aux_loss"),
)
EXPERT_BIAS = Seam(
    module=_ROUTER_MODULE,
    path="TopKRouter._apply_expert_bias",
    parameters=("routing_map", "padding_mask"),
)
_CHOICE_MODULE = "megatron.core.transformer.moe.moe_utils"  # where routers have it from
EXPERT_CHOICE = Seam(
    module=_ROUTER_MODULE, path="topk_routing_with_score_function", parameters=("logits", "topk")
)
# What is run in parts where a router is graphed.
MLP_FORWARD = Seam(
    module="megatron.core.transformer.transformer_layer",
    path="TransformerLayer._forward_mlp",
    parameters=("hidden_states", "padding_mask"),
)
EXPERT_FORWARD = Seam(
    module="megatron.core.transformer.moe.moe_layer",
    path="MoELayer.forward",
    parameters=("hidden_states", "padding_mask"),
)
# Module and attribute of a group that shards of experts are saved over, and no forward uses.
SAVING_GROUP = ("megatron.core.transformer.moe.experts", "dp_group")
EXPERT_PREPROCESS = Seam(
    module=EXPERT_FORWARD.module,
    path="MoELayer.preprocess",
    parameters=("hidden_states", "probs", "routing_map"),
)
_DISPATCHER_MODULE = "megatron.core.transformer.moe.token_dispatcher"
DISPATCH_PREPROCESS = Seam(
    module=_DISPATCHER_MODULE,
    path="MoEAlltoAllTokenDispatcher.dispatch_preprocess",
    parameters=("hidden_states", "routing_map", "probs"),
)
PERMUTED_ROWS = Seam(
    module=_DISPATCHER_MODULE,
    path="MoEAlltoAllTokenDispatcher.preprocess",
    parameters=("routing_map",),
)
PERMUTATION = Seam(
    module=_DISPATCHER_MODULE,
    path="permute",
    parameters=("tokens", "routing_map", "probs", "num_out_tokens", "fused", "drop_and_pad"),
)
EXPERT_SEAMS = (
    *(ROUTER_FORWARD, ROUTING, _ROUTER_LOSSES, EXPERT_CHOICE, EXPERT_BIAS, PERMUTED_ROWS, PERMUTATION),
    *(MLP_FORWARD, EXPERT_FORWARD, EXPERT_PREPROCESS, DISPATCH_PREPROCESS),
)


def replaced_choice() -> str | None:
    """The name of a function that a host has put in place of Megatron's choice of experts, or None."""
    function = below_ours(EXPERT_CHOICE.function())
    return None if made_in(function) == _CHOICE_MODULE else called_name(function)


def permutation_sorts() -> bool:
    """Whether Megatron sorts rows and returns five values; up to 0.16 a mask selects them, and it is 3."""
    return "tokens_per_expert" in inspect.signature(PERMUTATION.function()).parameters


@functools.cache
def router_losses_count_ranks() -> bool:
    """Whether a router's losses per token are multiplied by the number of ranks that share a pack.

    Up to 0.16 they are not: each rank adds its part of the tokens times its part of the loss.
    """
    return "tp_cp_group" in inspect.unwrap(_ROUTER_LOSSES.function()).__code__.co_names


_GROUP = "reduce_group"


@functools.cache
def _metrics_module() -> tuple[Any, bool]:
    """Where the metrics of experts are, and whether the module is theirs alone, as in later releases."""
    try:
        return importlib.import_module("megatron.core.transformer.moe.moe_logging"), True
    except ImportError:
        return importlib.import_module("megatron.core.transformer.moe.moe_utils"), False


def _metrics() -> Mapping[str, Any]:
    """What Megatron keeps of each, by name: an object, or a dictionary up to 0.16."""
    module, is_own = _metrics_module()
    found: Mapping[str, Any] = (
        module.get_moe_metrics_tracker().metrics if is_own else module.get_moe_layer_wise_logging_tracker()
    )
    return found


def moe_metrics() -> Mapping[str, Tensor]:
    """Megatron's metrics of experts as they are now, by name, each [layers]."""
    return {
        name: metric["values"] if isinstance(metric, dict) else metric.values
        for name, metric in _metrics().items()
    }


def metric_group(name: str) -> Any:
    """The process group over which one of them is added up; None where it is not."""
    metric = _metrics()[name]
    return metric.get(_GROUP) if isinstance(metric, dict) else getattr(metric, _GROUP)


def set_metric_group(name: str, group: Any) -> None:
    """Has one of them added up over another process group."""
    metric = _metrics()[name]
    if isinstance(metric, dict):
        metric[_GROUP] = group
    else:
        setattr(metric, _GROUP, group)
