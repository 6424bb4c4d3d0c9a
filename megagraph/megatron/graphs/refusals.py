# SPDX-License-Identifier: Apache-2.0
"""What keeps a whole model eager, by name. Reads the model's config and modules; changes nothing."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megagraph.config import GraphConfig, graph_modules
from megagraph.decide.reasons import EagerReason, Why
from megagraph.log import log
from megagraph.megatron import seams
from megagraph.megatron.graphs.entry import Doors
from megagraph.megatron.grouped_experts import SortingDispatcher, is_grouped
from megagraph.megatron.parallel.context import unsupported_sharing
from megagraph.megatron.parallel.model_parallel import has_experts, need_equal_rows
from megagraph.megatron.scopes.moe import EXPERTS, has_forced_routing, recomputes
from megagraph.megatron.scopes.parts import MAMBA, experts_of, is_mamba
from megagraph.megatron.scopes.rules import broken_rule, legal_scopes

__all__ = ["Refusal", "check_graph_options", "refusal_of", "scopes_of", "warm_up_of"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why every call of a model runs eager, and what is the matter."""

    reason: EagerReason
    sentence: str
    unless_by_token: bool = False  # not if rotary frequencies have a row for each token
    of_doors: Doors | None = None  # if it is a host's forward, with those of the block at the time

    def __str__(self) -> str:
        return f"stays eager ({self.reason.name}): {self.sentence}"


_BY_DEFAULT = GraphConfig()
_MEGATRONS_WARM_UP = 3  # by default

# An attribute of a config, the value that is fine, and what any other but None is called.
_Option = tuple[str, Any, str]
_UNSUPPORTED: Sequence[_Option] = (
    ("fp8", None, "fp8"),
    ("fp4", None, "fp4"),
    ("quant_recipe", None, "quantization by recipe"),
    ("use_kitchen", False, "quantization by Kitchen"),
    ("cpu_offloading", False, "CPU activation offload"),
    ("fine_grained_activation_offloading", False, "fine-grained activation offload"),
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
# What Megatron's nodes do not do as its layers do, or do not do at all.
_OVERLAP_UNSUPPORTED: Sequence[_Option] = (
    ("mtp_num_layers", 0, "with multi-token prediction"),
    ("moe_pad_expert_input_to_capacity", False, "with experts that are padded to a capacity"),
)
# Of routing that looks at all rows to choose for each.
_LOOK_AT_ALL_ROWS = ("sinkhorn", "quantile_balancing")

# Symbols of a HybridModel's layers; of some, what must be of Megatron's class, or derived from it.
_HYBRID_SUPPORTED = {**dict.fromkeys("*-+"), "M": ("Mamba", MAMBA), "E": ("experts", EXPERTS)}
_HYBRID_UNSUPPORTED = {"G": "a gated delta net", "D": "sparse attention"}
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


def scopes_of(model: Any, ours: Collection[str]) -> Collection[str]:
    """What of each layer is graphed: as the plugin is told, as the model's own config says, or what is legal.

    Raises `ValueError` if both say something, and not the same, or the model's names what is not supported.
    """
    for option in ("cuda_graph_modules", "cuda_graph_scope"):
        try:
            theirs = graph_modules(getattr(model.config, option, None))
        except ValueError as error:
            raise ValueError(f"{option} in the model's config: {error}") from error
        if theirs and ours and set(theirs) != set(ours):
            raise ValueError(
                f"expected cuda_graph_modules in megagraph's GraphConfig or {option} in the model's config, "
                f"got both: {', '.join(ours)} and {', '.join(theirs)}"
            )
        if theirs and not ours:
            ours = theirs
            log.info("graphs %s of each layer, as %s in the model's config says", ", ".join(ours), option)
    return ours or legal_scopes(model.config, [*model.decoder.layers])


def warm_up_of(config: Any, ours: int | None) -> int:
    """Eager training steps before the capture: as the plugin is told, or as the model's own config says."""
    option = "cuda_graph_warmup_steps"
    theirs = int(getattr(config, option, _MEGATRONS_WARM_UP))
    if ours is None and theirs != _MEGATRONS_WARM_UP:
        log.info("%d steps of warm-up, as %s in the model's config says", max(theirs, 1), option)
    return max(theirs, 1) if ours is None else ours


def refusal_of(
    model: nn.Module,
    ddp: nn.Module | None,
    scopes: Collection[str] = (),
    options: GraphConfig = _BY_DEFAULT,
    why_eager: Why | None = None,  # of all layers
) -> Refusal | None:
    """The first thing in a model, or in the DDP around it, that graphs of these scopes do not support yet."""
    what = next(_unsupported(model, ddp, options), None)
    if what is not None:
        return Refusal(reason=EagerReason.SCOPE_UNSUPPORTED, sentence=f"{what} is not supported yet")
    block: Any = model.decoder
    config: Any = model.config
    broken = broken_rule(config, scopes, list(block.layers)) or why_eager
    if broken is not None:
        return Refusal(reason=broken[0], sentence=broken[1])
    rope = seams.replaced_rope(is_mla=seams.has_mla(model), is_fused=config.apply_rope_fusion)
    if rope is None:
        return None
    what = f"{rope} in place of Megatron's RoPE is not supported yet"
    return Refusal(
        reason=EagerReason.SCOPE_UNSUPPORTED, sentence=what, unless_by_token=not config.apply_rope_fusion
    )


def _set(what: str, config: Any, attribute: str) -> str:
    """Something that an attribute of a config asks for."""
    return f"{what} ({attribute}={getattr(config, attribute)!r})"


def _other_options(config: Any, options: Sequence[_Option], of: str = "") -> Iterator[str]:
    """The options with another value than the one that is fine."""
    for attribute, fine, name in options:
        if getattr(config, attribute, fine) not in (fine, None):
            yield _set(of + name, config, attribute)


def _unsupported(model: Any, ddp: Any, options: GraphConfig) -> Iterator[str]:
    """What graphs do not support yet, in words; whoever asks stops at the first thing."""
    config, block = model.config, model.decoder
    yield from _other_options(config, _UNSUPPORTED)
    if config.overlap_moe_expert_parallel_comm:
        yield from _unsupported_overlap(config, block, options)
    if config.hybrid_context_parallel and not options.cp_sizes:
        yield f"{_set('hybrid context parallelism', config, 'hybrid_context_parallel')} without cp_sizes"
    if getattr(getattr(ddp, "ddp_config", None), "use_megatron_fsdp", False):
        yield "Megatron-FSDP"
    has_ranks = config.context_parallel_size > 1 or bool(options.cp_sizes)
    if has_ranks and getattr(model, "position_embedding_type", None) == "mrope":
        yield _set("multimodal RoPE with context parallelism", model, "position_embedding_type")
    if (problem := seams.unfit(model)) is not None:
        yield f"a model of which {problem}"
    prediction = getattr(model, "mtp", None)
    if prediction is not None and config.sequence_parallel:
        # Its losses are means over rows, of which the canonical pack has more.
        yield _set("multi-token prediction with sequence parallelism", config, "sequence_parallel")
    if prediction is not None and seams.is_replaced(prediction, seams.PREDICTION_FORWARD):
        yield f"multi-token prediction by {seams.called_name(prediction.forward)}"
    yield from _unsupported_pattern(block)
    yield from _unsupported_modules(block)
    if config.context_parallel_size > 1:
        for what in unsupported_sharing(model):
            yield _set(f"{what} with context parallelism", config, "context_parallel_size")
    if config.pipeline_model_parallel_size > 1:
        for what, is_there in {
            "multi-token prediction": bool(config.mtp_num_layers),
            "a HybridModel": hasattr(block, "layer_type_list"),
            "deferred gradients of the output layer's weight (defer_embedding_wgrad_compute)": (
                config.defer_embedding_wgrad_compute
            ),
        }.items():
            if is_there:
                yield _set(f"{what} with pipeline parallelism", config, "pipeline_model_parallel_size")
    if has_experts(config):
        yield from _unsupported_experts(config, block)


def _unsupported_overlap(config: Any, block: Any, options: GraphConfig) -> Iterator[str]:
    """What of a model cannot be trained under expert-parallel overlap, or not as without it."""
    overlap = "expert-parallel overlap "
    yield from _other_options(config, _OVERLAP_UNSUPPORTED, overlap)
    if options.cp_sizes:
        yield f"{overlap}with cp_sizes"
    if options.cuda_graph_granularity == "chunk":
        yield f"{overlap}with cuda_graph_granularity='chunk'"
    has_one_each = config.num_moe_experts == config.expert_model_parallel_size
    if has_one_each and seams.plans_free_what_one_expert_reads():
        yield _set(f"{overlap}with one expert a rank", config, "expert_model_parallel_size")
    if getattr(block, "final_layernorm", None) is not None and experts_of(block.layers[-1]) is None:
        what = f"{overlap}with a dense layer as the last, behind which Megatron leaves out the final norm"
        yield _set(what, config, "overlap_moe_expert_parallel_comm")


def _unsupported_pattern(block: Any) -> Iterator[str]:
    """Layers of a HybridStack of a kind that is not built; none of other blocks."""
    for symbol, layer in zip(getattr(block, "layer_type_list", ()), block.layers, strict=False):
        at = f"({symbol!r} in the hybrid layer pattern)"
        if symbol not in _HYBRID_SUPPORTED:
            yield f"{_HYBRID_UNSUPPORTED.get(symbol, 'an unknown kind of layer')} {at}"
        elif (kind := _HYBRID_SUPPORTED[symbol]) is not None and not kind[1].is_in(layer):
            yield f"{type(layer).__name__} as a layer of {kind[0]} {at}"


def _unsupported_modules(block: nn.Module) -> Iterator[str]:
    """Modules inside of a kind, or derived from one, that cannot run on a canonical pack."""
    in_mamba = {id(layer.mixer) for layer in block.modules() if is_mamba(layer)}
    for path, module in block.named_modules():
        if id(module) in in_mamba:
            continue
        at = f"({type(module).__name__} at {path})"
        if any(getattr(module, mark, None) for mark in _QUANTIZED):
            yield f"quantization {at}"
        names = [cls.__name__ for cls in type(module).__mro__]
        for end, name in _MODULES_UNSUPPORTED.items():
            if any(one.endswith(end) for one in names):
                yield f"{name} {at}"


def _unsupported_experts(config: Any, block: Any) -> Iterator[str]:
    """What of a model's experts is not supported yet."""
    experts = "mixture of experts "
    options = [*_EXPERTS_UNSUPPORTED, *(_EQUAL_ROWS_UNSUPPORTED if need_equal_rows(config) else ())]
    yield from _other_options(config, options, experts)
    kinds = config.moe_router_load_balancing_type
    if any(kind in _LOOK_AT_ALL_ROWS for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        yield _set(f"{experts}whose routing looks at all rows", config, "moe_router_load_balancing_type")
    layers = [found for layer in block.layers if (found := experts_of(layer)) is not None]
    if not layers:
        yield _set(f"{experts}in layers of a foreign kind", config, "num_moe_experts")
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

    known = (MoEAllGatherTokenDispatcher, seams.DISPATCH_PREPROCESS.owner(), SortingDispatcher)
    for layer in layers:
        if type(layer) is not seams.EXPERT_FORWARD.owner() and not is_grouped(layer):
            yield f"{experts}in a layer of class {type(layer).__qualname__}"
        if type(layer.token_dispatcher) not in known:
            yield _set(f"{experts}with another dispatcher", config, "moe_token_dispatcher_type")
        if not has_forced_routing(layer.router):
            continue
        told = f"{experts}whose routing is replayed or a host's"
        if recomputes(config, "moe"):  # in the backward pass nobody knows how many rows were given
            yield _set(f"{told}, and recomputed", config, "recompute_modules")
        if config.tensor_model_parallel_size > 1:  # whose ranks have a share of the rows
            yield _set(told, config, "tensor_model_parallel_size")
        if seams.is_replaced(layer.router, seams.ROUTER_FORWARD):
            router = type(layer.router).__qualname__
            yield f"{told}, behind a forward of its own, in a router of class {router}"
