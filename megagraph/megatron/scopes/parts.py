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
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megagraph.bank.sites import Outputs

__all__ = [
    *("ATTENTION", "MAMBA", "MLP", "LayerPart"),
    *("experts_of", "given_to_mamba", "is_mamba", "run_layer", "run_mlp"),
]


@dataclass(frozen=True, kw_only=True)
class LayerPart:
    """One of them, or what stays eager behind one."""

    name: str  # Megatron's, as `cuda_graph_modules` takes it; of a part that stays eager, one of ours
    is_in: Callable[[nn.Module], bool]  # whether a layer has it
    # Maps the layer, what the part before hands on and the layer's arguments to what it hands on: hidden
    # states, or several tensors if the next part takes them.
    run: Callable[[Any, Any, Mapping[str, Any]], Outputs]
    # All that run in its graph, by name; some are functions, and no modules.
    children: Callable[[Any], Sequence[str]] = lambda layer: ()
    # Of several tensors those, by index, that the next part alone reads.
    transient: Callable[[Any], Sequence[int]] = lambda layer: ()
    routes: bool = False  # it has a router, which adds to metrics that no module owns
    # Why it cannot be in a graph in some layer, and what to write instead; or None.
    check: Callable[[Any], str | None] = lambda layer: None


def _has(layer: nn.Module, child: str) -> bool:
    """Whether a layer has something in that place; an identity is what specs put where there is nothing."""
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    found = getattr(layer, child, None)
    return found is not None and not isinstance(found, IdentityOp | IdentityFuncOp)


def _run_attention(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    out: Tensor
    out, _context = layer._forward_attention(hidden_states=hidden_states, **arguments)
    return out


ATTENTION = LayerPart(
    name="attn",
    is_in=lambda layer: _has(layer, "self_attention"),
    run=_run_attention,
    children=lambda layer: (
        *("input_layernorm", "self_attention", "self_attn_bda"),
        *("pre_cross_attn_layernorm", "cross_attention", "cross_attn_bda"),
    ),
)


def run_mlp(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """The second half of a TransformerLayer, whatever its `mlp` is."""
    out: Tensor = layer._forward_mlp(hidden_states, padding_mask=arguments.get("padding_mask"))
    return out


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


# What a stack hands to such layers; rotary tables and masks are for the others.
_GIVEN = frozenset({"attention_mask", "packed_seq_params"})


def given_to_mamba(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of a block's arguments those that a Mamba layer takes."""
    return {name: value for name, value in arguments.items() if name in _GIVEN}


def run_layer(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """The hidden states that a layer returns, alone or before the context of cross attention."""
    if is_mamba(layer):
        arguments = given_to_mamba(arguments)
    out: Any = layer(hidden_states=hidden_states, **arguments)
    hidden: Tensor = out[0] if isinstance(out, tuple) else out
    return hidden


MAMBA = LayerPart(
    name="mamba",
    is_in=lambda layer: is_mamba(layer) and _has(layer, "mixer"),
    run=run_layer,
    children=lambda layer: ("norm", "mixer", "mamba_bda"),
)
