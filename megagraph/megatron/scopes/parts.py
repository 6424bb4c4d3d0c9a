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

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from megagraph.bank.sites import Outputs
from megagraph.megatron.seams import Seam, is_replaced

__all__ = [
    "ATTENTION",
    "MAMBA",
    "MLP",
    "LayerPart",
    "experts_of",
    "given_to_mamba",
    "is_mamba",
    "run_layer",
    "run_mlp",
]


@dataclass(frozen=True, kw_only=True)
class LayerPart:
    """One of them.

    Args:
        name: Megatron's, as `cuda_graph_modules` takes it; of a part that stays eager, one of ours.
        core: the child that does its work; a layer where it is an identity has no such part.
        children: all that it consists of.
        run: maps the layer, what the part before hands on and the layer's arguments to what it hands on:
            hidden states, or several tensors where the next part takes them.
        elsewhere: those of its children that a layer runs in another part.
        bypassed: children of which it calls parts, and not the child itself.
        in_parts: Megatron's methods of which it runs a part, by the child that has them; the layer's own
            under an empty name. A layer with another method in their place is not split.
        transient: of several tensors those, by index, that the next part alone reads.
        state: tensors that no module owns and that it changes, the same for all layers.
        accepts: tells layers whose `core` is of the part's kind from others.
        check: why it cannot be in a graph in some layer, and what to write instead, or None.
    """

    name: str
    core: str
    children: Sequence[str]
    run: Callable[[Any, Any, Mapping[str, Any]], Outputs]
    elsewhere: Callable[[Any], Collection[str]] = lambda layer: ()
    bypassed: Sequence[str] = ()
    in_parts: Mapping[str, Seam] = field(default_factory=dict)
    transient: Callable[[Any], Sequence[int]] = lambda layer: ()
    state: Callable[[Any], Sequence[Tensor]] = lambda layer: ()
    accepts: Callable[[nn.Module], bool] = lambda layer: True
    check: Callable[[Any], str | None] = lambda layer: None

    def is_in(self, layer: nn.Module) -> bool:
        """Whether a layer has it."""
        from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

        core = getattr(layer, self.core, None)  # an identity is what specs put where a layer has nothing
        return core is not None and not isinstance(core, IdentityOp | IdentityFuncOp) and self.accepts(layer)

    def children_of(self, layer: nn.Module) -> list[str]:
        """Those that a layer has as modules and runs here; others are functions."""
        elsewhere, modules = self.elsewhere(layer), dict(layer.named_modules(remove_duplicate=False))
        return [name for name in self.children if name in modules and name not in elsewhere]

    def unsupported(self, layer: nn.Module) -> str | None:
        """Why a layer cannot run it in a graph, or None."""
        for path, seam in self.in_parts.items():
            if is_replaced(layer.get_submodule(path), seam):
                return f"its {seam.path} is not Megatron's, so that its router cannot run alone"
        return self.check(layer)


def _run_attention(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    out: Tensor
    out, _context = layer._forward_attention(hidden_states=hidden_states, **arguments)
    return out


ATTENTION = LayerPart(
    name="attn",
    core="self_attention",
    children=(
        "input_layernorm",
        "self_attention",
        "self_attn_bda",
        "pre_cross_attn_layernorm",
        "cross_attention",
        "cross_attn_bda",
    ),
    run=_run_attention,
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
    core="mlp",
    children=("pre_mlp_layernorm", "mlp", "mlp_bda"),
    run=run_mlp,
    accepts=lambda layer: experts_of(layer) is None,
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
    core="mixer",
    children=("norm", "mixer", "mamba_bda"),
    run=run_layer,
    accepts=is_mamba,
)
