# SPDX-License-Identifier: Apache-2.0
"""The halves of a transformer layer that may be graphed apart: their modules, and how one runs alone."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from megagraph.bank.sites import Outputs
from megagraph.megatron.seams import Seam, is_replaced

__all__ = ["Half"]


@dataclass(frozen=True, kw_only=True)
class Half:
    """One of them.

    Args:
        name: Megatron's, as `cuda_graph_modules` takes it; of a half that stays eager, one of ours.
        core: the child that does its work; where it is an identity, a layer has no such half.
        children: all that it consists of.
        run: maps the layer, what the half before hands on and the layer's arguments to what it hands on:
            hidden states, or several tensors where the next half takes them.
        elsewhere: those of its children that a layer runs in another half.
        bypassed: children of which it calls parts, and not the child itself.
        in_parts: Megatron's methods of which it runs a part, by the child that has them; the layer's own
            under an empty name. A layer with another method in their place is not split.
        transient: of several tensors those, by index, that the next half alone reads.
        state: tensors that no module owns and that it changes, the same for all layers; None for none.
        accepts: tells layers whose `core` is of the half's kind from others.
        why_not: why it cannot be in a graph in some layer, and what to write instead, or None.
        why_eager: why it is never in a graph, and what to write instead; None where it may be.
    """

    name: str
    core: str
    children: Sequence[str]
    run: Callable[[Any, Any, Mapping[str, Any]], Outputs]
    elsewhere: Callable[[Any], Collection[str]] = lambda layer: ()
    bypassed: Sequence[str] = ()
    in_parts: Mapping[str, Seam] = field(default_factory=dict)
    transient: Callable[[Any], Sequence[int]] = lambda layer: ()
    state: Callable[[Any], Sequence[Tensor]] | None = None
    accepts: Callable[[nn.Module], bool] = lambda layer: True
    why_not: Callable[[Any], str | None] = lambda layer: None
    why_eager: str | None = None

    def is_in(self, layer: nn.Module) -> bool:
        """Whether a layer has it."""
        core = getattr(layer, self.core, None)
        return core is not None and not _is_identity(core) and self.accepts(layer)

    def children_of(self, layer: nn.Module) -> list[str]:
        """Those that a layer has as modules and runs here; others are functions."""
        elsewhere = self.elsewhere(layer)
        return [
            name
            for name in self.children
            if name not in elsewhere and isinstance(_child(layer, name), nn.Module)
        ]

    def why_not_of(self, layer: nn.Module) -> str | None:
        """Why a layer cannot run it in a graph, or None."""
        for path, seam in self.in_parts.items():
            if is_replaced(layer.get_submodule(path), seam):
                return f"its {seam.path} is not Megatron's, so that its router cannot run alone"
        return self.why_not(layer)


def _child(layer: Any, path: str) -> Any:
    """What a layer has at a dotted path, or None."""
    found = layer
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _is_identity(module: Any) -> bool:
    """Whether it is what Megatron's specs put where a layer has nothing."""
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    return isinstance(module, IdentityOp | IdentityFuncOp)
