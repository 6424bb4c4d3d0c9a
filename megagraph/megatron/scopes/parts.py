# SPDX-License-Identifier: Apache-2.0
"""The dense scopes: which modules of a layer each takes into a graph, and how these run alone.

| scope | enters | runs | leaves |
|---|---|---|---|
| whole layer | hidden states | everything; what else it is given is constant | hidden states |
| `attn` | hidden states; the pack's offsets and tables | norm, attention, dropout, residual | hidden states |
| `mlp` | hidden states after attention | norm, MLP, dropout, residual | hidden states |
| `mamba` | hidden states; the document of each row | norm, mixer, dropout, residual | hidden states |

What leaves `attn` is saved by the norm of the MLP, and stays until its backward. A Mamba layer has no halves,
and is graphed whole or not at all. Its mixer carries a state from row to row. Where that begins anew is what
the pack says: `seq_idx` of `PackedSeqParams`, or, in releases without that field, its offsets, of which each
mixer makes the same. In releases that have the field a pack without it is one document to the mixer, in eager
and in graphs. The layer takes and returns hidden states alone: no tables, and no mask.

With `delay_wgrad_compute` Transformer Engine's linear layers queue what the gradients of their weights are to
be made of, and `backward_dw()` makes them. Core's own leave nothing to be done.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.bank.rng import kept_streams
from megagraph.bank.sites import Outputs
from megagraph.megatron.seams import LAYER_FORWARD, MLP_FORWARD, as_before, called_name, is_replaced, stand_in

__all__ = [
    *("DENSE", "MAMBA", "MLP", "Front", "LayerPart", "Run", "delaying", "experts_of"),
    *("given_to_mamba", "in_mlp", "is_mamba", "run_layer", "run_mlp", "why_not_halved"),
]


# From a layer, what the part before hands on, and the layer's arguments.
Run = Callable[[Any, Any, Mapping[str, Any]], Outputs]
# Rows and probabilities to dispatch, the output of shared experts if there is any, and what entered the half.
Front = tuple[Tensor, Tensor, Tensor | None, Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerPart:
    """One of them, or what stays eager behind one."""

    name: str  # Megatron's, as `cuda_graph_modules` takes it; of a part that stays eager, one of ours
    run: Run  # to what it hands on: hidden states, or several tensors if the next part takes them
    # Whether a layer has it; nobody asks of parts that stand for the experts that a layer has.
    is_in: Callable[[nn.Module], bool] = lambda layer: True
    # All that run in its graph, by name; some are functions, and no modules.
    children: Callable[[Any], Sequence[str]] = lambda layer: ()
    # Of several tensors those, by index, that the next part alone reads.
    transient: Callable[[Any], Sequence[int]] = lambda layer: ()
    routes: bool = False  # it has a router, which adds to metrics that no module owns
    # Of what stays eager behind a router in a graph: all up to the dispatch, which plans run as one node.
    front: Callable[[Any, Sequence[Tensor]], Front] | None = None
    # Makes what gradients of weights its backward has left, as the node of a plan does.
    late: Callable[[Any], object] = lambda layer: None
    # Why it cannot be in a graph in some layer, and what to write instead; or None.
    check: Callable[[Any], str | None] = lambda layer: None


def _has(layer: nn.Module, child: str) -> bool:
    """Whether a layer has something in that place; an identity is what specs put where there is nothing."""
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    found = getattr(layer, child, None)
    return found is not None and not isinstance(found, IdentityOp | IdentityFuncOp)


def _run_half(
    layer: Any, entered: Any, arguments: Mapping[str, Any], own: Callable[..., Any], **others: Any
) -> Any:
    """One half of a layer; inside of its forward if that or its MLP's is a host's, others in its place."""
    if not (is_replaced(layer, LAYER_FORWARD) or is_replaced(layer, MLP_FORWARD)):
        return own()
    with stand_in(layer, **others):
        out, _context = layer.forward(hidden_states=entered, **arguments)
    return out


def _no_attention(hidden_states: Any, *_: Any, **__: Any) -> Any:
    return hidden_states, None


def why_not_halved(layer: Any) -> str | None:
    """Why attention and MLP of a layer must not run apart; None if its forward hands on what they return.

    A host's forward is asked: it runs without them, on nothing. What stands in place of the call is not.
    """
    if set_by_host := sorted(vars(layer).keys() & {"_call_impl", "_compiled_call_impl"}):
        return f"its halves cannot be told apart: a host has set its {set_by_host[0]}"
    entered, between, left = (torch.empty(1, 1, 1, device="meta") for _ in range(3))
    met: list[Any] = []

    def half(returned: Any, hidden_states: Any, *_: Any, **__: Any) -> Any:
        met.append(hidden_states)
        return returned

    attention, mlp = functools.partial(half, (between, None)), functools.partial(half, left)
    halves: Any = {"_forward_attention": attention, "_forward_mlp": mlp}
    nothing = dict.fromkeys(("attention_mask", "rotary_pos_emb", "packed_seq_params"))
    why = "does more than hand on what they return"
    try:
        with kept_streams(layer), as_before(vars(layer)):
            met.append(_run_half(layer, entered, nothing, lambda: mlp(attention(entered)[0]), **halves))
    except Exception as error:
        why = f"fails without them ({type(error).__name__}: {error})"
    if [*map(id, met)] == [id(entered), id(between), id(left)]:
        return None
    return f"its halves cannot be told apart: its forward, {called_name(layer.forward)}, {why}"


def _run_attention(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Any:
    def own() -> Any:
        return layer._forward_attention(hidden_states=hidden_states, **arguments)[0]

    return _run_half(layer, hidden_states, arguments, own, _forward_mlp=lambda hidden, *_, **__: hidden)


_ATTENTION = LayerPart(
    name="attn",
    is_in=lambda layer: _has(layer, "self_attention"),
    run=_run_attention,
    late=lambda layer: layer.self_attention.backward_dw(),
    children=lambda layer: (
        *("input_layernorm", "self_attention", "self_attn_bda"),
        *("pre_cross_attn_layernorm", "cross_attention", "cross_attn_bda"),
    ),
)


def run_mlp(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Any:
    """The second half of a TransformerLayer, whatever its `mlp` is."""
    own = functools.partial(layer._forward_mlp, hidden_states, padding_mask=arguments.get("padding_mask"))
    return _run_half(layer, hidden_states, arguments, own, _forward_attention=_no_attention)


def in_mlp(run: Run) -> Run:
    """A part of that half. The last tensor that it takes entered the half."""

    def run_there(layer: Any, before: Any, arguments: Mapping[str, Any]) -> Any:
        def own(*_: Any, **__: Any) -> Outputs:
            return run(layer, before, arguments)

        entered = before if isinstance(before, Tensor) else before[-1]
        return _run_half(layer, entered, arguments, own, _forward_attention=_no_attention, _forward_mlp=own)

    return run_there


def delaying(modules: Iterable[nn.Module]) -> list[Any]:
    """Those of some modules that leave gradients of their weights to be made later."""
    stores = ((module, getattr(module, "wgrad_store", None)) for module in modules)
    return [module for module, store in stores if store is not None and store.delay_wgrad_compute()]


def experts_of(layer: nn.Module) -> Any:
    """The MoELayer of a transformer layer, of Megatron's class or derived from it; None if it has none."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    mlp = getattr(layer, "mlp", None)
    return mlp if isinstance(mlp, BaseMoELayer) else None


MLP = LayerPart(
    name="mlp",
    is_in=lambda layer: _has(layer, "mlp") and experts_of(layer) is None,
    run=run_mlp,
    children=lambda layer: ("pre_mlp_layernorm", "mlp", "mlp_bda"),
)


def is_mamba(layer: nn.Module) -> bool:
    """Whether it is a layer of Megatron's `MambaLayer`, or of a class derived from it."""
    from megatron.core.ssm.mamba_layer import MambaLayer

    return isinstance(layer, MambaLayer)


def given_to_mamba(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of a block's arguments those that a Mamba layer takes; rotary tables and masks are for the others."""
    return {name: arguments[name] for name in ("attention_mask", "packed_seq_params") if name in arguments}


def run_layer(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Any:
    """The hidden states that a layer returns, alone or before the context of cross attention."""
    if is_mamba(layer):
        arguments = given_to_mamba(arguments)
    out = layer(hidden_states=hidden_states, **arguments)
    return out[0] if isinstance(out, tuple) else out


MAMBA = LayerPart(
    name="mamba",
    is_in=lambda layer: is_mamba(layer) and _has(layer, "mixer"),
    run=run_layer,
    children=lambda layer: ("norm", "mixer", "mamba_bda"),
)
DENSE = (_ATTENTION, MLP, MAMBA)
