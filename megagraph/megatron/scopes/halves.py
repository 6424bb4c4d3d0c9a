# SPDX-License-Identifier: Apache-2.0
"""The halves of a transformer layer that may be graphed apart: their modules, and how one runs alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megagraph.bank.sites import Outputs

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
        bypassed: children of which it calls parts, and not the child itself.
        transient: of several tensors those, by index, that the next half alone reads.
        state: tensors that no module owns and that it changes.
        accepts: tells layers whose `core` is of the half's kind from others.
        why_eager: why it is never in a graph, and what to write instead; None where it may be.
    """

    name: str
    core: str
    children: Sequence[str]
    run: Callable[[Any, Any, Mapping[str, Any]], Outputs]
    bypassed: Sequence[str] = ()
    transient: Callable[[Any], Sequence[int]] = lambda layer: ()
    state: Callable[[Any], Sequence[Tensor]] = lambda layer: ()
    accepts: Callable[[nn.Module], bool] = lambda layer: True
    why_eager: str | None = None

    def is_in(self, layer: nn.Module) -> bool:
        """Whether a layer has it."""
        core = getattr(layer, self.core, None)
        return core is not None and not _is_identity(core) and self.accepts(layer)

    def children_of(self, layer: nn.Module) -> list[str]:
        """Those that a layer has as modules; others are functions."""
        return [name for name in self.children if isinstance(_child(layer, name), nn.Module)]


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
