# SPDX-License-Identifier: Apache-2.0
"""What keeps a whole model eager, by name. Reads the model's config and modules; changes nothing."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from megagraph.config import GraphConfig, graph_modules
from megagraph.decide.reasons import EagerReason
from megagraph.log import log
from megagraph.megatron.graphs.experts import unsupported_experts
from megagraph.megatron.parallel.context_view import unsupported_sharing
from megagraph.megatron.scopes.moe import EXPERTS
from megagraph.megatron.scopes.parts import MAMBA, is_mamba
from megagraph.megatron.scopes.rules import Asked, broken_rule
from megagraph.megatron.seams import PREDICTION_FORWARD, has_mla, is_replaced, replaced_rope

__all__ = ["Refusal", "check_graph_options", "refusal_of", "scopes_of"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why every call of a model runs eager, and the sentence for the log."""

    reason: EagerReason
    sentence: str

    def log(self) -> str:
        """Says so in the log. Returns what it said."""
        said = f"stays eager ({self.reason.name}): {self.sentence}"
        log.warning(said)
        return said


_BY_DEFAULT = GraphConfig()
# (config attribute, value that is fine, what it is called)
_UNSUPPORTED = (
    ("fp8", None, "fp8"),
    ("fp4", None, "fp4"),
    ("cpu_offloading", False, "CPU activation offload"),
    ("fine_grained_activation_offloading", False, "fine-grained activation offload"),
    ("overlap_moe_expert_parallel_comm", False, "expert-parallel overlap"),
    ("qk_clip", False, "clipping of attention's queries and keys"),
    ("log_max_attention_logit", False, "logging of attention's largest logit"),
)
_DDP_UNSUPPORTED = (("use_megatron_fsdp", "Megatron-FSDP"),)

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

    Args:
        model_config: Megatron's.
        ours: `cuda_graph_modules` of the plugin.

    Raises:
        ValueError: where both say something, and not the same, or the model's names what is not supported.
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
    """The first thing in a model that graphs do not support yet, or None.

    Args:
        model: the GPTModel or HybridModel.
        ddp: Megatron's DDP around it, or None.
        scopes: what of each layer is graphed; none for whole layers.
        options: the plugin's.
    """
    config: Any = model.config
    for attribute, fine, name in _UNSUPPORTED:
        if getattr(config, attribute, fine) not in (fine, None):
            return _not_supported(f"{name} ({attribute}={getattr(config, attribute)!r})")
    if config.hybrid_context_parallel and not options.cp_sizes:
        return _not_supported("hybrid context parallelism (hybrid_context_parallel=True) without cp_sizes")
    ddp_config: Any = getattr(ddp, "ddp_config", None)
    for attribute, name in _DDP_UNSUPPORTED:
        if getattr(ddp_config, attribute, False):
            return _not_supported(name)
    if getattr(model, "position_embedding_type", None) == "mrope":
        return _not_supported("multimodal RoPE (position_embedding_type='mrope')")
    replaced = replaced_rope(is_mla=has_mla(model), is_fused=config.apply_rope_fusion)
    if replaced is not None:
        return _not_supported(f"{replaced} in place of Megatron's RoPE")
    block: Any = model.decoder
    refusal = _refusal_of_prediction(model) or _refusal_of_pattern(block) or _refusal_of_modules(block)
    refusal = refusal or _refusal_of_context(model) or _refusal_of_pipeline(model)
    if refusal is not None:
        return refusal
    experts = unsupported_experts(config, block)
    if experts is not None:
        return _not_supported(experts)
    broken = broken_rule(Asked(config=config, scopes=scopes, layers=list(block.layers)))
    if broken is None:
        return None
    rule, sentence = broken
    return Refusal(reason=rule.reason, sentence=sentence)


def _refusal_of_prediction(model: Any) -> Refusal | None:
    """Multi-token prediction that could not be handed the pack as it was given, or None."""
    block = getattr(model, "mtp", None)
    if block is None:
        return None
    if model.config.sequence_parallel:
        # Its losses are means over rows, of which the canonical pack has more.
        return _not_supported("multi-token prediction with sequence parallelism (sequence_parallel=True)")
    if is_replaced(block, PREDICTION_FORWARD):
        return _not_supported(f"multi-token prediction by a forward of {type(block).__qualname__}'s own")
    return None


def _refusal_of_context(model: Any) -> Refusal | None:
    """What ranks cannot share packs in, or None where they share none."""
    size = model.config.context_parallel_size
    if size == 1:
        return None
    why = unsupported_sharing(model)
    if why is None:
        return None
    return _not_supported(f"{why} with context parallelism (context_parallel_size={size})")


def _refusal_of_pipeline(model: Any) -> Refusal | None:
    """What stages of a pipeline cannot have yet, or None."""
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
    if what is None:
        return None
    return _not_supported(f"{what} with pipeline parallelism (pipeline_model_parallel_size={size})")


def _refusal_of_pattern(block: Any) -> Refusal | None:
    """The first layer of a HybridStack of a kind that is not built; None for other blocks."""
    for symbol, layer in zip(getattr(block, "layer_type_list", ()), block.layers, strict=False):
        if symbol not in _HYBRID_SUPPORTED:
            name = _HYBRID_UNSUPPORTED.get(symbol, "an unknown kind of layer")
            return _not_supported(f"{name} ({symbol!r} in the hybrid layer pattern)")
        if symbol in _OF_KIND and not _OF_KIND[symbol][1].is_in(layer):
            named = f"layer of {_OF_KIND[symbol][0]} ({symbol!r} in the hybrid layer pattern)"
            return _not_supported(f"{type(layer).__name__} as a {named}")
    return None


def _refusal_of_modules(block: nn.Module) -> Refusal | None:
    """The first module inside of a kind, or derived from one, that cannot run on a canonical pack."""
    in_mamba = {id(layer.mixer) for layer in block.modules() if is_mamba(layer)}
    for path, module in block.named_modules():
        if id(module) in in_mamba:
            continue
        names = [cls.__name__ for cls in type(module).__mro__]
        for end, name in _MODULES_UNSUPPORTED.items():
            if any(one.endswith(end) for one in names):
                return _not_supported(f"{name} ({type(module).__name__} at {path})")
    return None


def _not_supported(name: str) -> Refusal:
    return Refusal(reason=EagerReason.SCOPE_UNSUPPORTED, sentence=f"{name} is not supported yet")
