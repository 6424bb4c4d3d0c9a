# SPDX-License-Identifier: Apache-2.0
"""What keeps a whole model eager, by name. Reads the model's config and modules; changes nothing.

Scopes have rules: which may be named together, and with which options of a model. R7 to R19 are those that
Megatron has for its own graphs, and checks only where these are switched on; M1 to M4 are ours alone.
docs/scopes.md has them as a table, with R13, which is `legal_scopes()`.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megagraph.config import GraphConfig, graph_modules
from megagraph.log import log
from megagraph.megatron import seams
from megagraph.megatron.grouped_experts import SortingDispatcher, is_grouped
from megagraph.megatron.parallel.context import unsupported_sharing
from megagraph.megatron.parallel.model_parallel import has_experts, need_equal_rows
from megagraph.megatron.scopes.moe import EXPERTS, MOE, ROUTER, has_forced_routing, has_grouped, recomputes
from megagraph.megatron.scopes.parts import DENSE, MAMBA, MLP, experts_of, is_mamba
from megagraph.reasons import EagerReason, Why

__all__ = ["Refusal", "broken_rule", "check_graph_options", "legal_scopes", "refusal_of", "scopes_of"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why every call of a model runs eager, and what is the matter."""

    reason: EagerReason = EagerReason.SCOPE_UNSUPPORTED
    sentence: str
    unless_by_token: bool = False  # not if rotary frequencies have a row for each token

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


def refusal_of(
    model: Any,
    ddp: nn.Module | None,
    scopes: Collection[str] = (),
    options: GraphConfig = _BY_DEFAULT,
    why_eager: Why | None = None,  # of all layers
) -> Refusal | None:
    """The first thing in a model, or in the DDP around it, that graphs of these scopes do not support yet."""
    what = next(_unsupported(model, ddp, options), None)
    if what is not None:
        return Refusal(sentence=f"{what} is not supported yet")
    config = model.config
    broken = broken_rule(config, scopes, [*model.decoder.layers]) or why_eager
    if broken is not None:
        return Refusal(reason=broken[0], sentence=broken[1])
    rope = seams.replaced_rope(is_mla=seams.has_mla(model), is_fused=config.apply_rope_fusion)
    if rope is None:
        return None
    what = f"{rope} in place of Megatron's RoPE is not supported yet"
    return Refusal(sentence=what, unless_by_token=not config.apply_rope_fusion)


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
    if ddp is not None and not hasattr(ddp, "param_to_bucket_group"):  # it shards the parameters
        yield f"data parallelism by {type(ddp).__name__}"
    has_ranks = config.context_parallel_size > 1 or bool(options.cp_sizes)
    if has_ranks and getattr(model, "position_embedding_type", None) == "mrope":
        yield _set("multimodal RoPE with context parallelism", model, "position_embedding_type")
    if any("rotary_pos_emb." in name and it.requires_grad for name, it in model.named_parameters()):
        yield "a learned rotary table"  # ours keep cosines and sines, without a history
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
    from megatron.core.transformer.mlp import MLP as Dense
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

    others = (it for it in block.layers if not is_mamba(it) and (MLP.is_in(it) or not hasattr(it, "mlp")))
    if not layers and not all(isinstance(getattr(it, "mlp", None), Dense) for it in others):
        yield _set(f"{experts}in layers of a foreign kind", config, "num_moe_experts")
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


# -- the rules of scopes -----------------------------------------------------------------------------

_NAMED, _RECOMPUTED = "cuda_graph_modules", "recompute_modules"
_OVERLAPS = "overlap_moe_expert_parallel_comm"

# The number of a rule that is broken, and a sentence that says so and what to write instead.
Broken = Iterator[tuple[str, str]]


def broken_rule(config: Any, scopes: Collection[str], layers: Sequence[nn.Module]) -> Why | None:
    """What calls count as by the first rule that is broken, and its sentence. No scopes are whole layers."""
    broken = (rules(config, scopes, layers) for rules in (_of_scopes, _of_recomputing, _of_ours))
    for name, why in itertools.chain.from_iterable(broken):
        reason = EagerReason.RECOMPUTING if name == "R14" else EagerReason.SCOPE_UNSUPPORTED
        return reason, f"{why} ({name})"
    return None


def legal_scopes(config: Any, layers: Sequence[nn.Module]) -> Sequence[str]:
    """What is graphed if nobody names anything: whole layers, which nothing says, unless experts stay eager.

    Then it is all but these, as far as that is legal.
    """
    # Experts stay eager, too, if somebody may tell their router what to choose.
    whole = {id(it) for it in layers if has_grouped(it) and MOE.check(it) is None}
    waiting = [layer for layer in layers if EXPERTS.is_in(layer) and id(layer) not in whole]
    is_planned = getattr(config, _OVERLAPS, False)
    legal = [part for part in DENSE if not (is_planned and part is MLP)]  # M4
    named = [part.name for part in legal if any(map(part.is_in, layers))]
    may_route = all(ROUTER.check(layer) is None for layer in waiting)
    for scopes in ([*named, ROUTER.name], named) if may_route else (named,):
        if (waiting or is_planned) and scopes and broken_rule(config, scopes, layers) is None:
            log.info("experts stay eager, so that %s are graphed", ", ".join(scopes))
            return scopes
    return ()


def _of_scopes(config: Any, scopes: Collection[str], layers: Sequence[nn.Module]) -> Broken:
    """What goes together, and what the experts have to be for it."""
    has_mixture = (getattr(config, "num_moe_experts", None) or 0) > 1  # as in Megatron's, one is no mixture
    drops = has_mixture and config.moe_expert_capacity_factor is not None
    pads = drops and config.moe_pad_expert_input_to_capacity  # each gets as many rows in each micro-batch
    if "moe" in scopes and "moe_router" in scopes:
        yield "R7", f"{_NAMED} names 'moe', and 'moe_router', which is a part of it; leave one of them out"
    if "moe_preprocess" in scopes and "moe_router" not in scopes:
        why = "names 'moe_preprocess' without 'moe_router', on which it goes on; add 'moe_router'"
        yield "R8", f"{_NAMED} {why}"
    of_experts = [scope for scope in ("moe", "moe_router", "moe_preprocess") if scope in scopes]
    if of_experts and not has_mixture:
        why = f"names {of_experts[0]!r}, and the model has no experts to choose from; leave it out"
        yield "R9", f"{_NAMED} {why}"
    often = getattr(config, "moe_layer_freq", 1)  # some other stage of a pipeline may have a dense layer
    is_dense_elsewhere = 0 in often if isinstance(often, list) else often != 1
    if "mlp" in scopes and has_mixture and not is_dense_elsewhere and not any(map(MLP.is_in, layers)):
        why = (
            f"{_NAMED} names 'mlp', which is that of dense layers, and every layer has experts; leave it "
            "out, and name 'attn', or 'attn' and 'moe_router'"
        )
        yield "R10", why
    are_grouped = len(layers) > 0 and all(has_grouped(layer) for layer in layers if EXPERTS.is_in(layer))
    if "moe" in scopes and has_mixture and not pads and not are_grouped:
        why = (
            f"{_NAMED} names 'moe', and how many rows an expert gets is another number in each micro-batch; "
            "set moe_expert_capacity_factor and moe_pad_expert_input_to_capacity=True, or name 'moe_router' "
            "instead"
        )
        yield "R11", why
    waits = has_mixture and not pads and config.moe_token_dispatcher_type == "alltoall"
    if "moe_preprocess" in scopes and waits:
        option = "moe_expert_capacity_factor" if drops else "moe_router_padding_for_quantization"
        instead = ", or set moe_pad_expert_input_to_capacity=True" if drops else ""
        if drops or getattr(config, option, False):
            why = (
                f"{_NAMED} names 'moe_preprocess', and with {option} the dispatcher 'alltoall' waits there "
                f"for counts from the device; leave it out{instead}"
            )
            yield "R12", why


def _of_recomputing(config: Any, scopes: Collection[str], layers: Sequence[nn.Module]) -> Broken:
    """What runs again in the backward pass, and draws random numbers there or leaves the graph."""
    if getattr(config, "recompute_granularity", None) not in (None, "selective"):
        why = (
            "full recompute runs each layer again in the backward pass, outside any graph; write "
            "recompute_granularity='selective' with recompute_modules, or None"
        )
        yield "R14", why
    if "moe_router" in scopes and recomputes(config, "moe"):
        why = (
            f"{_RECOMPUTED} names 'moe', which runs the router again in the backward pass, and {_NAMED} "
            "'moe_router'; leave one of them out"
        )
        yield "R15", why
    for name, scope, module, draws, never in (
        ("R16", "attn", "core_attn", "attention_dropout", 0),
        ("R17", "mlp", "mlp", "hidden_dropout", 0),
        ("R17", "moe", "moe", "hidden_dropout", 0),
        ("R18", "moe", "moe", "moe_input_jitter_eps", None),
    ):
        is_graphed = not scopes or scope in scopes  # alone or with its layer
        option = getattr(config, draws, never)
        if option == never or not is_graphed or not recomputes(config, module):
            continue
        if scopes:
            at = f"names {scope!r}; leave one of them out"
        else:
            at = f"no scope, so that whole layers are; leave {module!r} out, or name scopes without {scope!r}"
        what = f"names {module!r}, which with {draws}={option!r} must be in no graph"
        yield name, f"{_RECOMPUTED} {what}, and {_NAMED} {at}"
    # Megatron switches the recomputing off if the model's own config names the scope, with a warning.
    norms = (getattr(it, "recompute_pre_mlp_layernorm", False) for it in layers if EXPERTS.is_in(it))
    if "moe_router" in scopes and any(norms):
        why = (
            f"{_RECOMPUTED} names 'layernorm', whose output leaves the graph of the router, and {_NAMED} "
            "'moe_router'; leave one of them out, or name the scopes in the model's own config, as Megatron "
            "then recomputes no norm of experts"
        )
        yield "R19", why


def _of_ours(config: Any, scopes: Collection[str], layers: Sequence[nn.Module]) -> Broken:
    # Releases differ in where they widen residuals.
    if "moe_router" in scopes and getattr(config, "fp32_residual_connection", False):
        why = "with fp32_residual_connection=True is not supported yet; leave one out"
        yield "M1", f"'moe_router' in {_NAMED} {why}"
    # What a host's choice looks at beside its arguments is no part of a graph: experts to choose again, say.
    is_graphed = "moe" in scopes if scopes else any(map(has_grouped, layers))
    if ("moe_router" in scopes or is_graphed) and (replaced := seams.replaced_choice()) is not None:
        named = f"{_NAMED} names {'what chooses experts' if scopes else 'no scope'}"
        yield "M2", f"{named}, and {replaced} chooses experts in place of Megatron; name 'attn' instead"
    # A hook of DDP makes them, on another stream: no graph has that.
    option = "overlap_dispatch_backward_with_experts_wgrad"
    if is_graphed and getattr(config, option, False):
        named = f"{_NAMED} names 'moe'" if scopes else f"{_NAMED} names no scope"
        what = f"{option}=True makes gradients of experts outside of any graph; leave one of them out"
        yield "M3", f"{named}, and {what}"
    # Nodes of Megatron's run these beside other micro-batches.
    of_nodes = next((scope for scope in ("mlp", "moe") if scope in scopes), None)
    if getattr(config, _OVERLAPS, False) and (of_nodes or not scopes):
        where = f"{_NAMED} names {of_nodes!r}" if scopes else f"{_NAMED} names no scope"
        why = "and with expert-parallel overlap nothing behind the dispatch may be in a graph"
        yield "M4", f"{where}, {why}; name 'attn', or 'attn' and 'moe_router'"
