# SPDX-License-Identifier: Apache-2.0
"""Which mixtures of experts run on canonical packs: those whose router lets rows past the pack's end go."""

from typing import Any

from torch import nn

from megagraph.megatron.grouped_experts import SortingDispatcher, is_grouped
from megagraph.megatron.parallel.groups import ranks_of
from megagraph.megatron.parallel.model_parallel import has_experts, need_equal_rows
from megagraph.megatron.parallel.peers import HostGroup
from megagraph.megatron.scopes.moe import has_forced_routing, recomputes
from megagraph.megatron.scopes.parts import experts_of
from megagraph.megatron.seams import ROUTER_FORWARD, is_replaced

__all__ = ["ranks_of_experts", "rows_are_samples", "unsupported_experts"]

# Of routing that looks at all rows to choose for each.
_LOOK_AT_ALL_ROWS = ("sinkhorn", "quantile_balancing")
# (config attribute, value that is fine, what it is called)
_UNSUPPORTED = (
    ("expert_tensor_parallel_size", 1, "each over several ranks"),
    ("moe_router_fusion", False, "whose router is fused, and takes no padding mask"),
    ("mlp_chunks_for_training", 1, "in chunks, which are given no padding mask"),
)

# What has layers of experts on other rows than the canonical pack's.
_NO_EQUAL_ROWS = (
    ("tensor_model_parallel_size", 1, "tensor parallelism"),
    ("mtp_num_layers", 0, "multi-token prediction"),
)


def ranks_of_experts(model: Any) -> HostGroup:
    """The ranks that the experts of a model's layers are spread over."""
    mixture = next(found for layer in model.decoder.layers if (found := experts_of(layer)) is not None)
    # In all layers; looked up once, since other ranks would have other experts.
    spread_over = ranks_of(mixture.token_dispatcher.tp_ep_group)
    return HostGroup(lambda: spread_over, "share the experts")


def rows_are_samples(params: Any) -> bool:
    """Whether a pack is of samples of one length, which layers of experts take apart again."""
    return getattr(params, "tokens_per_sample", None) is not None


def unsupported_experts(config: Any, block: Any) -> str | None:
    """What of a model's experts is not supported yet, in words; None where all is.

    Args:
        config: of the model.
        block: its block of layers.
    """
    if not has_experts(config):
        return None
    for attribute, fine, name in _UNSUPPORTED:
        if getattr(config, attribute, fine) not in (fine, None):
            return _in_words(name, attribute, config)
    for attribute, fine, name in _NO_EQUAL_ROWS if need_equal_rows(config) else ():
        if getattr(config, attribute) not in (fine, None):
            return _in_words(f"over several ranks that need equal rows, with {name}", attribute, config)
    kinds = config.moe_router_load_balancing_type
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind in _LOOK_AT_ALL_ROWS:
            return _in_words("whose routing looks at all rows", "moe_router_load_balancing_type", config)
    layers = [found for layer in block.layers if (found := experts_of(layer)) is not None]
    if not layers:
        return _in_words("in layers of a foreign kind", "num_moe_experts", config)
    return next((why for layer in layers if (why := _unsupported_layer(layer, config)) is not None), None)


def _unsupported_layer(layer: Any, config: Any) -> str | None:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import (
        MoEAllGatherTokenDispatcher,
        MoEAlltoAllTokenDispatcher,
    )

    if type(layer) is not MoELayer and not is_grouped(layer):
        return _of_class("in a layer of class", layer)
    known = (MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher, SortingDispatcher)
    if type(layer.token_dispatcher) not in known:
        return _in_words("with another dispatcher", "moe_token_dispatcher_type", config)
    if not has_forced_routing(layer.router):
        return None
    if recomputes(config, "moe"):  # in the backward pass nobody knows how many rows were given
        return _in_words("whose routing is replayed or a host's, and recomputed", "recompute_modules", config)
    if config.tensor_model_parallel_size > 1:  # whose ranks have a share of the rows
        return _in_words("whose routing is replayed or a host's", "tensor_model_parallel_size", config)
    if is_replaced(layer.router, ROUTER_FORWARD):
        what = "whose routing is replayed or a host's, behind a forward of its own, in a router of class"
        return _of_class(what, layer.router)
    return None


def _in_words(name: str, attribute: str, config: Any) -> str:
    return f"mixture of experts {name} ({attribute}={getattr(config, attribute)!r})"


def _of_class(name: str, module: nn.Module) -> str:
    return f"mixture of experts {name} {type(module).__qualname__}"
