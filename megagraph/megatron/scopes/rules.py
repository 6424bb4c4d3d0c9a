# SPDX-License-Identifier: Apache-2.0
"""Which scopes may be named together, and with which options of a model. Reads; changes nothing.

The rules R7 to R19 are those that Megatron has for its own graphs, and checks only where these are switched
on. Ours are switched on elsewhere, so that each is checked here, when a model is first seen. docs/scopes.md
has them as a table, and those that are about `cuda_graph_impl`, which must be `none`; an error says so
(`check_graph_options()`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megagraph.decide.reasons import EagerReason
from megagraph.megatron.scopes.moe import EXPERTS, EXPERTS_WAIT, GROUPED, recomputes
from megagraph.megatron.scopes.parts import MLP
from megagraph.megatron.seams import replaced_choice

__all__ = ["RULES", "Asked", "Rule", "broken_rule", "broken_rules"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be graphed of which model.

    Args:
        config: Megatron's, of the model.
        scopes: Megatron's names; none for whole layers.
        layers: of its block.
    """

    config: Any
    scopes: Collection[str]
    layers: Sequence[nn.Module]

    def graphs(self, scope: str) -> bool:
        """Whether that is in a graph, alone or with its layer."""
        return not self.scopes or scope in self.scopes

    @property
    def experts(self) -> int:
        """How many a layer may have; as in Megatron's rules, one alone is no mixture."""
        return getattr(self.config, "num_moe_experts", None) or 0

    @property
    def drops_and_pads(self) -> bool:
        """Whether each expert gets as many rows in each micro-batch."""
        config = self.config
        return config.moe_expert_capacity_factor is not None and config.moe_pad_expert_input_to_capacity


Check = Callable[[Asked], str | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One of them.

    Args:
        name: its number; M where Megatron has no such rule.
        check: what breaks it and what to write instead, or None.
        reason: under which calls are counted that run eager for it.
        keeps: what stays eager where it is broken: the `model`, or a `layer`, which the plan leaves out.
    """

    name: str
    check: Check
    reason: EagerReason = EagerReason.SCOPE_UNSUPPORTED
    keeps: str = "model"


RULES: list[Rule] = []


def _rule(name: str, **how: Any) -> Callable[[Check], Check]:
    """Makes a check the next rule."""

    def add(check: Check) -> Check:
        RULES.append(Rule(name=name, check=check, **how))
        return check

    return add


def broken_rules(asked: Asked) -> list[tuple[Rule, str]]:
    """All rules that are broken, in their order, each with the sentence that says so."""
    found = ((rule, rule.check(asked)) for rule in RULES)
    return [(rule, f"{why} ({rule.name})") for rule, why in found if why is not None]


def broken_rule(asked: Asked) -> tuple[Rule, str] | None:
    """The first one that keeps the whole model eager, or None."""
    return next((broken for broken in broken_rules(asked) if broken[0].keeps == "model"), None)


_NAMED = "cuda_graph_modules"
_RECOMPUTED = "recompute_modules"


@_rule("R7")
def _experts_and_their_router(asked: Asked) -> str | None:
    if not {"moe", "moe_router"} <= set(asked.scopes):
        return None
    return f"{_NAMED} names 'moe', and 'moe_router', which is a part of it; leave one of them out"


@_rule("R8")
def _preprocess_without_router(asked: Asked) -> str | None:
    if "moe_preprocess" not in asked.scopes or "moe_router" in asked.scopes:
        return None
    return f"{_NAMED} names 'moe_preprocess' without 'moe_router', on which it goes on; add 'moe_router'"


@_rule("R9")
def _no_experts(asked: Asked) -> str | None:
    named = [scope for scope in ("moe", "moe_router", "moe_preprocess") if scope in asked.scopes]
    if not named or asked.experts > 1:
        return None
    return f"{_NAMED} names {named[0]!r}, and the model has no experts to choose from; leave it out"


@_rule("R10")
def _no_dense_layer(asked: Asked) -> str | None:
    if "mlp" not in asked.scopes or asked.experts <= 1 or any(map(MLP.is_in, asked.layers)):
        return None
    often = getattr(asked.config, "moe_layer_freq", 1)
    if not (often == 1 or (isinstance(often, list) and 0 not in often)):
        return None  # some other stage of a pipeline may have one
    return (
        f"{_NAMED} names 'mlp', which is that of dense layers, and every layer has experts; leave it out, "
        "and name 'attn', or 'attn' and 'moe_router'"
    )


@_rule("R11")
def _experts_of_any_size(asked: Asked) -> str | None:
    if "moe" not in asked.scopes or asked.experts <= 1 or asked.drops_and_pads:
        return None
    if any(map(GROUPED.is_in, asked.layers)) and not any(map(_waits_for_counts, asked.layers)):
        return None
    return (
        f"{_NAMED} names 'moe', and how many rows an expert gets is another number in each micro-batch; set "
        "moe_expert_capacity_factor and moe_pad_expert_input_to_capacity=True, or name 'moe_router' instead"
    )


def _waits_for_counts(layer: nn.Module) -> bool:
    return EXPERTS.is_in(layer) and not GROUPED.is_in(layer)


@_rule("R12")
def _counts_on_the_host(asked: Asked) -> str | None:
    config = asked.config
    if "moe_preprocess" not in asked.scopes or asked.experts <= 1 or asked.drops_and_pads:
        return None
    if config.moe_token_dispatcher_type != "alltoall":
        return None
    drops = config.moe_expert_capacity_factor is not None
    if not drops and not getattr(config, "moe_router_padding_for_quantization", False):
        return None
    why = "moe_expert_capacity_factor" if drops else "moe_router_padding_for_quantization"
    instead = ", or set moe_pad_expert_input_to_capacity=True" if drops else ""
    return (
        f"{_NAMED} names 'moe_preprocess', and with {why} the dispatcher 'alltoall' waits there for counts "
        f"from the device; leave it out{instead}"
    )


@_rule("R13", keeps="layer")
def _whole_layer_of_experts(asked: Asked) -> str | None:
    if asked.scopes or not any(map(_waits_for_counts, asked.layers)):
        return None
    return EXPERTS_WAIT


@_rule("R14", reason=EagerReason.RECOMPUTING)
def _full_recompute(asked: Asked) -> str | None:
    if getattr(asked.config, "recompute_granularity", None) in (None, "selective"):
        return None
    return (
        "full recompute runs each layer again in the backward pass, outside any graph; write "
        "recompute_granularity='selective' with recompute_modules, or None"
    )


@_rule("R15")
def _router_in_recomputed_experts(asked: Asked) -> str | None:
    if "moe_router" not in asked.scopes or not recomputes(asked.config, "moe"):
        return None
    return (
        f"{_RECOMPUTED} names 'moe', which runs the router again in the backward pass, and {_NAMED} "
        "'moe_router'; leave one of them out"
    )


def _graphed_and_recomputed(asked: Asked, scope: str, module: str, draws: str) -> str | None:
    """Of what draws random numbers."""
    if not asked.graphs(scope) or not recomputes(asked.config, module):
        return None
    where = f"names {scope!r}; leave one of them out"
    if not asked.scopes:
        where = f"no scope, so that whole layers are; leave {module!r} out, or name scopes without {scope!r}"
    option = f"{draws}={getattr(asked.config, draws)!r}"
    return f"{_RECOMPUTED} names {module!r}, which with {option} must be in no graph, and {_NAMED} {where}"


@_rule("R16")
def _dropout_of_recomputed_attention(asked: Asked) -> str | None:
    if asked.config.attention_dropout == 0:
        return None
    return _graphed_and_recomputed(asked, "attn", "core_attn", "attention_dropout")


@_rule("R17")
def _dropout_of_recomputed_mlp(asked: Asked) -> str | None:
    if asked.config.hidden_dropout == 0:
        return None
    both = (_graphed_and_recomputed(asked, scope, scope, "hidden_dropout") for scope in ("mlp", "moe"))
    return next((why for why in both if why is not None), None)


@_rule("R18")
def _jitter_of_recomputed_experts(asked: Asked) -> str | None:
    if getattr(asked.config, "moe_input_jitter_eps", None) is None:
        return None
    return _graphed_and_recomputed(asked, "moe", "moe", "moe_input_jitter_eps")


@_rule("R19")
def _norm_leaves_and_is_recomputed(asked: Asked) -> str | None:
    """Megatron switches the recomputing off where the model's own config names the scope, with a warning."""
    with_experts = filter(EXPERTS.is_in, asked.layers)
    if "moe_router" not in asked.scopes or not any(map(_recomputes_norm, with_experts)):
        return None
    return (
        f"{_RECOMPUTED} names 'layernorm', whose output leaves the graph of the router, and {_NAMED} "
        "'moe_router'; leave one of them out, or name the scopes in the model's own config, as Megatron "
        "then recomputes no norm of experts"
    )


def _recomputes_norm(layer: Any) -> bool:
    return bool(getattr(layer, "recompute_pre_mlp_layernorm", False))


@_rule("M1")
def _wide_residuals(asked: Asked) -> str | None:
    """Releases differ in where they widen them."""
    if "moe_router" not in asked.scopes or not getattr(asked.config, "fp32_residual_connection", False):
        return None
    return f"'moe_router' in {_NAMED} with fp32_residual_connection=True is not supported yet; leave one out"


@_rule("M2")
def _choice_of_a_host(asked: Asked) -> str | None:
    """What it looks at beside its arguments is no part of a graph: experts to choose again, say."""
    replaced = replaced_choice() if "moe_router" in asked.scopes or "moe" in asked.scopes else None
    if replaced is None:
        return None
    return (
        f"{_NAMED} names what chooses experts, and {replaced} does so in place of Megatron; leave 'moe' and "
        "'moe_router' out"
    )


@_rule("M3")
def _weight_gradients_of_experts_apart(asked: Asked) -> str | None:
    """A hook of DDP makes them, on another stream: no graph has that."""
    option = "overlap_dispatch_backward_with_experts_wgrad"
    if asked.experts <= 1 or not getattr(asked.config, option, False) or not asked.graphs("moe"):
        return None
    if not asked.scopes and not any(map(GROUPED.is_in, asked.layers)):
        return None
    named = f"{_NAMED} names 'moe'" if asked.scopes else f"{_NAMED} names no scope"
    return (
        f"{named}, and {option}=True makes gradients of experts outside of any graph; leave one of them out"
    )
