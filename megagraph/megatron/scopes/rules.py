# SPDX-License-Identifier: Apache-2.0
"""Which scopes may be named together, and with which options of a model. Reads; changes nothing.

The rules R7 to R19 are those that Megatron has for its own graphs, and checks only where these are switched
on; M1 to M4 are ours alone. docs/scopes.md has them as a table, with R13, which is `legal_scopes()`.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn

from megagraph.decide.reasons import EagerReason, Why
from megagraph.log import log
from megagraph.megatron.scopes.moe import EXPERTS, ROUTER, has_grouped, recomputes
from megagraph.megatron.scopes.parts import DENSE, MLP
from megagraph.megatron.seams import replaced_choice

__all__ = ["broken_rule", "legal_scopes"]

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
    """What is graphed if nobody names anything: whole layers, which nothing says, unless experts would wait.

    Then it is all but these, as far as that is legal.
    """
    waiting = [layer for layer in layers if EXPERTS.is_in(layer) and not has_grouped(layer)]
    named = [part.name for part in DENSE if any(map(part.is_in, layers))]
    is_planned = getattr(config, _OVERLAPS, False)
    if is_planned and MLP.name in named:  # M4
        named.remove(MLP.name)
    may_route = all(ROUTER.check(layer) is None for layer in waiting)
    for scopes in ([*named, ROUTER.name], named) if may_route else (named,):
        if (waiting or is_planned) and scopes and broken_rule(config, scopes, layers) is None:
            log.info("experts wait for the device, so that %s are graphed", ", ".join(scopes))
            return scopes
    return ()


def _of_scopes(config: Any, scopes: Collection[str], layers: Sequence[nn.Module]) -> Broken:
    """What goes together, and what the experts have to be for it."""
    has_experts = (getattr(config, "num_moe_experts", None) or 0) > 1  # as in Megatron's, one is no mixture
    drops = has_experts and config.moe_expert_capacity_factor is not None
    pads = drops and config.moe_pad_expert_input_to_capacity  # each gets as many rows in each micro-batch
    if "moe" in scopes and "moe_router" in scopes:
        yield "R7", f"{_NAMED} names 'moe', and 'moe_router', which is a part of it; leave one of them out"
    if "moe_preprocess" in scopes and "moe_router" not in scopes:
        why = "names 'moe_preprocess' without 'moe_router', on which it goes on; add 'moe_router'"
        yield "R8", f"{_NAMED} {why}"
    of_experts = [scope for scope in ("moe", "moe_router", "moe_preprocess") if scope in scopes]
    if of_experts and not has_experts:
        why = f"names {of_experts[0]!r}, and the model has no experts to choose from; leave it out"
        yield "R9", f"{_NAMED} {why}"
    often = getattr(config, "moe_layer_freq", 1)  # some other stage of a pipeline may have a dense layer
    is_dense_elsewhere = 0 in often if isinstance(often, list) else often != 1
    if "mlp" in scopes and has_experts and not is_dense_elsewhere and not any(map(MLP.is_in, layers)):
        why = (
            f"{_NAMED} names 'mlp', which is that of dense layers, and every layer has experts; leave it "
            "out, and name 'attn', or 'attn' and 'moe_router'"
        )
        yield "R10", why
    are_grouped = {has_grouped(layer) for layer in layers if EXPERTS.is_in(layer)} == {True}
    if "moe" in scopes and has_experts and not pads and not are_grouped:
        why = (
            f"{_NAMED} names 'moe', and how many rows an expert gets is another number in each micro-batch; "
            "set moe_expert_capacity_factor and moe_pad_expert_input_to_capacity=True, or name 'moe_router' "
            "instead"
        )
        yield "R11", why
    waits = has_experts and not pads and config.moe_token_dispatcher_type == "alltoall"
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
            where = f"names {scope!r}; leave one of them out"
        else:
            instead = f"leave {module!r} out, or name scopes without {scope!r}"
            where = f"no scope, so that whole layers are; {instead}"
        what = f"names {module!r}, which with {draws}={option!r} must be in no graph"
        yield name, f"{_RECOMPUTED} {what}, and {_NAMED} {where}"
    # Megatron switches the recomputing off if the model's own config names the scope, with a warning.
    with_experts = filter(EXPERTS.is_in, layers)
    norms = (getattr(layer, "recompute_pre_mlp_layernorm", False) for layer in with_experts)
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
    replaced = replaced_choice() if "moe_router" in scopes or "moe" in scopes else None
    if replaced is not None:
        why = (
            f"{_NAMED} names what chooses experts, and {replaced} does so in place of Megatron; leave 'moe' "
            "and 'moe_router' out"
        )
        yield "M2", why
    # A hook of DDP makes them, on another stream: no graph has that.
    option = "overlap_dispatch_backward_with_experts_wgrad"
    has_experts = (getattr(config, "num_moe_experts", None) or 0) > 1
    is_graphed = "moe" in scopes if scopes else any(map(has_grouped, layers))
    if has_experts and getattr(config, option, False) and is_graphed:
        named = f"{_NAMED} names 'moe'" if scopes else f"{_NAMED} names no scope"
        what = f"{option}=True makes gradients of experts outside of any graph; leave one of them out"
        yield "M3", f"{named}, and {what}"
    # Nodes of Megatron's run these beside other micro-batches.
    of_nodes = next((scope for scope in ("mlp", "moe") if scope in scopes), None)
    if getattr(config, _OVERLAPS, False) and (of_nodes or not scopes):
        where = f"{_NAMED} names {of_nodes!r}" if scopes else f"{_NAMED} names no scope"
        why = "and with expert-parallel overlap nothing behind the dispatch may be in a graph"
        yield "M4", f"{where}, {why}; name 'attn', or 'attn' and 'moe_router'"
