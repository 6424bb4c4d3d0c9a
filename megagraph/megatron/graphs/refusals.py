# SPDX-License-Identifier: Apache-2.0
"""What keeps a whole model eager, by name. Reads the model's config and modules; changes nothing.

Mixtures of experts run on canonical packs if their router lets rows past the pack's end go.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megagraph.config import GraphConfig, graph_modules
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.grouped_experts import SortingDispatcher, is_grouped
from megagraph.megatron.parallel.context import unsupported_sharing
from megagraph.megatron.parallel.model_parallel import has_experts, need_equal_rows
from megagraph.megatron.scopes.moe import EXPERTS, has_forced_routing, recomputes
from megagraph.megatron.scopes.parts import MAMBA, experts_of, is_mamba
from megagraph.megatron.scopes.rules import broken_rule
from megagraph.megatron.seams import PREDICTION_FORWARD, ROUTER_FORWARD, has_mla, is_replaced, replaced_rope

__all__ = ["Refusal", "check_graph_options", "refusal_of", "scopes_of"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why every call of a model runs eager, and what is the matter."""

    reason: EagerReason
    sentence: str

    def __str__(self) -> str:
        return f"stays eager ({self.reason.name}): {self.sentence}"


_BY_DEFAULT = GraphConfig()

# An attribute of a config, the value that is fine, and what any other but None is called.
_Option = tuple[str, Any, str]
_UNSUPPORTED: Sequence[_Option] = (
    ("fp8", None, "fp8"),
    ("fp4", None, "fp4"),
    ("quant_recipe", None, "quantization by recipe"),
    ("use_kitchen", False, "quantization by Kitchen"),
    ("cpu_offloading", False, "CPU activation offload"),
    ("fine_grained_activation_offloading", False, "fine-grained activation offload"),
    ("overlap_moe_expert_parallel_comm", False, "expert-parallel overlap"),
    ("qk_clip", False, "clipping of attention's queries and keys"),
    ("log_max_attention_logit", False, "logging of attention's largest logit"),
)
_EXPERTS_UNSUPPORTED: Sequence[_Option] = (
    ("expert_tensor_parallel_size", 1, "each over several ranks"),
    ("moe_router_fusion", False, "whose router is fused, and takes no padding mask"),
    ("mlp_chunks_for_training", 1, "in chunks, which are given no padding mask"),
)
# What has layers of experts on other rows than the canonical pack's.
_EQUAL_ROWS_UNSUPPORTED: Sequence[_Option] = (
    ("tensor_model_parallel_size", 1, "over several ranks that need equal rows, with tensor parallelism"),
    ("mtp_num_layers", 0, "over several ranks that need equal rows, with multi-token prediction"),
)
# Of routing that looks at all rows to choose for each.
_LOOK_AT_ALL_ROWS = ("sinkhorn", "quantile_balancing")

# Symbols of a HybridModel's layers.
_HYBRID_SUPPORTED = ("*", "-", "+", "M", "E")
_HYBRID_UNSUPPORTED = {
    "G": "a gated delta net",
    "D": "sparse attention",
}
# Those that must be of Megatron's class, or derived from it.
_OF_KIND = {"M": ("Mamba", MAMBA), "E": ("experts", EXPERTS)}
# Ends of the names of modules that need offsets up to the last row, or states between documents.
_MODULES_UNSUPPORTED = {
    "GatedDeltaNet": "a gated delta net",
    "_GDNBase": "a gated delta net",
    "DSAttention": "sparse attention",
    "AbsorbedMLASelfAttention": "absorbed multi-latent attention",
    "MambaMixer": "a Mamba mixer outside of a MambaLayer",
}

# What modules of Transformer Engine have whose weights are quantized anew after each step, by Python alone.
_QUANTIZED = ("te_quant_params", "primary_weights_in_fp8")


def check_graph_options(config: Any) -> None:
    """Raises `ValueError` if Megatron's own graphs are switched on as well."""
    impl = getattr(config, "cuda_graph_impl", "none")
    if impl != "none" or getattr(config, "enable_cuda_graph", False):
        raise ValueError(
            "megagraph graphs the model itself: expected cuda_graph_impl 'none' in the model's config, "
            f"got {impl!r}; set the options in megagraph's GraphConfig instead"
        )


def scopes_of(model_config: Any, ours: Collection[str]) -> Collection[str]:
    """What of each layer is graphed: as the plugin is told, or as the model's own config says.

    Raises `ValueError` if both say something, and not the same, or the model's names what is not supported.
    """
    for option in ("cuda_graph_modules", "cuda_graph_scope"):
        try:
            theirs = graph_modules(getattr(model_config, option, None))
        except ValueError as error:
            raise ValueError(f"{option} in the model's config: {error}") from error
        if theirs and ours and set(theirs) != set(ours):
            raise ValueError(
                f"expected cuda_graph_modules in megagraph's GraphConfig or {option} in the model's config, "
                f"got both: {', '.join(ours)} and {', '.join(theirs)}"
            )
        ours = ours or theirs
    return ours


def refusal_of(
    model: nn.Module,
    ddp: nn.Module | None,
    scopes: Collection[str] = (),
    options: GraphConfig = _BY_DEFAULT,
) -> Refusal | None:
    """The first thing in a model, or in the DDP around it, that graphs of these scopes do not support yet."""
    what = _unsupported(model, ddp, options)
    if what is not None:
        return Refusal(reason=EagerReason.SCOPE_UNSUPPORTED, sentence=f"{what} is not supported yet")
    block: Any = model.decoder
    broken = broken_rule(model.config, scopes, list(block.layers))
    return None if broken is None else Refusal(reason=broken[0], sentence=broken[1])


def _unsupported(model: Any, ddp: Any, options: GraphConfig) -> str | None:
    config, block = model.config, model.decoder
    option = _unsupported_option(config, _UNSUPPORTED)
    if option is not None:
        attribute, name = option
        return f"{name} ({attribute}={getattr(config, attribute)!r})"
    if config.hybrid_context_parallel and not options.cp_sizes:
        return "hybrid context parallelism (hybrid_context_parallel=True) without cp_sizes"
    if getattr(getattr(ddp, "ddp_config", None), "use_megatron_fsdp", False):
        return "Megatron-FSDP"
    if getattr(model, "position_embedding_type", None) == "mrope":
        return "multimodal RoPE (position_embedding_type='mrope')"
    replaced = replaced_rope(is_mla=has_mla(model), is_fused=config.apply_rope_fusion)
    if replaced is not None:
        return f"{replaced} in place of Megatron's RoPE"
    return (
        _unsupported_prediction(model)
        or _unsupported_pattern(block)
        or _unsupported_module(block)
        or _unsupported_context(model)
        or _unsupported_pipeline(model)
        or _unsupported_experts(config, block)
    )


def _unsupported_option(config: Any, options: Sequence[_Option]) -> tuple[str, str] | None:
    """The attribute of the first option with another value than the one that is fine, and its name."""
    for attribute, fine, name in options:
        if getattr(config, attribute, fine) not in (fine, None):
            return attribute, name
    return None


def _unsupported_prediction(model: Any) -> str | None:
    """Multi-token prediction that could not be handed the pack as it was given."""
    block = getattr(model, "mtp", None)
    if block is None:
        return None
    if model.config.sequence_parallel:
        # Its losses are means over rows, of which the canonical pack has more.
        return "multi-token prediction with sequence parallelism (sequence_parallel=True)"
    if is_replaced(block, PREDICTION_FORWARD):
        return f"multi-token prediction by a forward of {type(block).__qualname__}'s own"
    return None


def _unsupported_context(model: Any) -> str | None:
    """What context-parallel ranks cannot share packs in."""
    size = model.config.context_parallel_size
    what = next(unsupported_sharing(model), None) if size > 1 else None
    return None if what is None else f"{what} with context parallelism (context_parallel_size={size})"


def _unsupported_pipeline(model: Any) -> str | None:
    """What stages of a pipeline cannot have yet."""
    config = model.config
    size = config.pipeline_model_parallel_size
    if size == 1:
        return None
    found = {
        "multi-token prediction": bool(config.mtp_num_layers),
        "a HybridModel": hasattr(model.decoder, "layer_type_list"),
        "deferred gradients of the output layer's weight (defer_embedding_wgrad_compute)": (
            config.defer_embedding_wgrad_compute
        ),
    }
    what = next((name for name, is_there in found.items() if is_there), None)
    return None if what is None else f"{what} with pipeline parallelism (pipeline_model_parallel_size={size})"


def _unsupported_pattern(block: Any) -> str | None:
    """The first layer of a HybridStack of a kind that is not built; None for other blocks."""
    for symbol, layer in zip(getattr(block, "layer_type_list", ()), block.layers, strict=False):
        if symbol not in _HYBRID_SUPPORTED:
            name = _HYBRID_UNSUPPORTED.get(symbol, "an unknown kind of layer")
            return f"{name} ({symbol!r} in the hybrid layer pattern)"
        if symbol in _OF_KIND and not _OF_KIND[symbol][1].is_in(layer):
            named = f"layer of {_OF_KIND[symbol][0]} ({symbol!r} in the hybrid layer pattern)"
            return f"{type(layer).__name__} as a {named}"
    return None


def _unsupported_module(block: nn.Module) -> str | None:
    """The first module inside of a kind, or derived from one, that cannot run on a canonical pack."""
    in_mamba = {id(layer.mixer) for layer in block.modules() if is_mamba(layer)}
    for path, module in block.named_modules():
        if id(module) in in_mamba:
            continue
        if any(getattr(module, mark, None) for mark in _QUANTIZED):
            return f"quantization ({type(module).__name__} at {path})"
        names = [cls.__name__ for cls in type(module).__mro__]
        for end, name in _MODULES_UNSUPPORTED.items():
            if any(one.endswith(end) for one in names):
                return f"{name} ({type(module).__name__} at {path})"
    return None


def _unsupported_experts(config: Any, block: Any) -> str | None:
    """What of a model's experts is not supported yet."""
    if not has_experts(config):
        return None
    options = [*_EXPERTS_UNSUPPORTED, *(_EQUAL_ROWS_UNSUPPORTED if need_equal_rows(config) else ())]
    option = _unsupported_option(config, options)
    if option is not None:
        attribute, name = option
        return _experts(name, attribute, config)
    kinds = config.moe_router_load_balancing_type
    if any(kind in _LOOK_AT_ALL_ROWS for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return _experts("whose routing looks at all rows", "moe_router_load_balancing_type", config)
    layers = [found for layer in block.layers if (found := experts_of(layer)) is not None]
    if not layers:
        return _experts("in layers of a foreign kind", "num_moe_experts", config)
    return next((what for layer in layers if (what := _unsupported_mixture(layer, config)) is not None), None)


def _unsupported_mixture(layer: Any, config: Any) -> str | None:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import (
        MoEAllGatherTokenDispatcher,
        MoEAlltoAllTokenDispatcher,
    )

    if type(layer) is not MoELayer and not is_grouped(layer):
        return f"mixture of experts in a layer of class {type(layer).__qualname__}"
    known = (MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher, SortingDispatcher)
    if type(layer.token_dispatcher) not in known:
        return _experts("with another dispatcher", "moe_token_dispatcher_type", config)
    if not has_forced_routing(layer.router):
        return None
    whose = "whose routing is replayed or a host's"
    if recomputes(config, "moe"):  # in the backward pass nobody knows how many rows were given
        return _experts(f"{whose}, and recomputed", "recompute_modules", config)
    if config.tensor_model_parallel_size > 1:  # whose ranks have a share of the rows
        return _experts(whose, "tensor_model_parallel_size", config)
    if is_replaced(layer.router, ROUTER_FORWARD):
        router = type(layer.router).__qualname__
        return f"mixture of experts {whose}, behind a forward of its own, in a router of class {router}"
    return None


def _experts(name: str, attribute: str, config: Any) -> str:
    return f"mixture of experts {name} ({attribute}={getattr(config, attribute)!r})"
