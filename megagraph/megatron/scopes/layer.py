# SPDX-License-Identifier: Apache-2.0
"""Scope: a whole transformer layer. Hidden states enter and leave; everything else is constant.

Megatron's loop over the layers costs 12 us a layer. So where a micro-batch replays, the block's `layers`
are shadowed by one callable that runs them all, in one go where it can; the rest of the block's forward
(its contexts, the final norm) stays Megatron's own.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.sites import SiteSpec

__all__ = ["LayerLoop", "layer_sites", "shadowed_layers"]


def layer_sites(
    layers: Sequence[nn.Module], context: Callable[[], contextlib.AbstractContextManager[Any]]
) -> list[SiteSpec]:
    """One site for each layer of a block.

    Args:
        layers: of the block, in execution order.
        context: entered around each; a capture runs layers without their block.
    """

    def forward(layer: nn.Module, hidden_states: Tensor, **arguments: Any) -> Tensor:
        with context():
            return _hidden_states_of(layer, hidden_states, **arguments)

    return [
        SiteSpec(name=f"layer {index} ({type(layer).__name__})", module=layer, forward=forward)
        for index, layer in enumerate(layers)
    ]


def _hidden_states_of(layer: nn.Module, hidden_states: Tensor, **arguments: Any) -> Tensor:
    """The first thing that a layer returns; the other is the context of cross attention."""
    out: Tensor
    out, _context = layer(hidden_states=hidden_states, **arguments)
    return out


class LayerLoop:
    """Stands in for all layers of a block while one micro-batch replays.

    Args:
        specs: the block's own layers, in order.
        sites: their graphs.
        replay_all: all of them in one go.
        constants: the arguments that the graphs were captured with; a call with others runs eager.
        equal_constants: the last tensor that equalled a constant, by name; kept up here.
        eager_input: pads the hidden states for a layer that runs eager first.
        eager_arguments: the canonical pack's arguments, for a layer that runs eager.
        refuse: counts a whole micro-batch that runs eager, since its arguments differ.
        before_layer: called with each layer's index before it replays, or None.
    """

    def __init__(
        self,
        specs: Sequence[SiteSpec],
        sites: Sequence[_C.Site],
        replay_all: _C.Site,
        constants: Mapping[str, Any],
        equal_constants: dict[str, Tensor],
        eager_input: Callable[[Tensor], Tensor],
        eager_arguments: Callable[[], Mapping[str, Any]],
        refuse: Callable[[], None],
        before_layer: Callable[[int], None] | None,
    ) -> None:
        self._specs = specs
        self._sites = sites
        self._replay_all = replay_all
        self._constants = constants
        self._equal_constants = equal_constants
        self._eager_input = eager_input
        self._eager_arguments = eager_arguments
        self._refuse = refuse
        self._before_layer = before_layer

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Runs every layer: its graph, or itself where its site answers so."""
        if not all(self._is_constant(name, value) for name, value in arguments.items()):
            self._refuse()
            hidden_states = self._eager_input(hidden_states)
            for spec in self._specs:
                hidden_states = self._run_eager(spec, hidden_states, arguments)
            return hidden_states, None
        if self._before_layer is None:
            out = self._replay_all(hidden_states)
            if out is not NotImplemented:
                return out, None
        padded = False
        for index, site in enumerate(self._sites):
            if self._before_layer is not None:
                self._before_layer(index)
            out = site(hidden_states)
            if out is NotImplemented:
                given = hidden_states if padded else self._eager_input(hidden_states)
                out = self._run_eager(self._specs[index], given, arguments)
            hidden_states, padded = out, True
        return hidden_states, None

    def _is_constant(self, name: str, value: Any) -> bool:
        """Whether an argument is what the graphs were captured with.

        Megatron keeps 32 rotary tables, over all models, and makes one that it dropped anew: an equal
        tensor is compared once, which waits for the device, and known from then on.
        """
        known = self._constants.get(name)
        if value is known or value is self._equal_constants.get(name):
            return True
        if not (isinstance(value, Tensor) and isinstance(known, Tensor)):
            return False
        if value.shape != known.shape or value.dtype != known.dtype or not torch.equal(value, known):
            return False
        self._equal_constants[name] = value
        return True

    def _run_eager(self, spec: SiteSpec, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        out = _hidden_states_of(spec.module, hidden_states, **{**arguments, **self._eager_arguments()})
        # Megatron adds residuals with gradients switched on, also where the caller has them off.
        return out if torch.is_grad_enabled() else out.detach()


@contextlib.contextmanager
def shadowed_layers(block: nn.Module, loop: LayerLoop) -> Iterator[None]:
    """While inside, `block.layers` is the loop alone; the registered modules are untouched."""
    block.__dict__["layers"] = (loop,)
    try:
        yield
    finally:
        del block.__dict__["layers"]
