# SPDX-License-Identifier: Apache-2.0
"""Scope: a whole transformer layer. Hidden states enter and leave; everything else is constant.

Megatron's loop over the layers costs 12 us a layer. So where a micro-batch replays, the block's `layers`
are shadowed by one callable that runs them all, in one go where it can; the rest of the block's forward
(its contexts, the final norm) stays Megatron's own.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megagraph.bank.chain import Chain
from megagraph.bank.sites import SiteSpec
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.scopes.arguments import Constants

__all__ = ["LayerLoop", "RunningBatch", "layer_sites", "shadowed_layers"]


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


class RunningBatch(Protocol):
    """What the loop asks of the micro-batch that it runs."""

    reason: EagerReason | None

    def heed_table(self, table: Any, hidden_states: Tensor) -> None:
        """Takes note of a rotary table that is not the capture's."""
        ...

    def pad(self, hidden_states: Tensor) -> Tensor:
        """The hidden states of the canonical pack."""
        ...

    def canonical_params(self) -> Any:
        """The canonical pack."""
        ...


class LayerLoop:
    """Stands in for all layers of a block while a micro-batch of one variant replays.

    Args:
        chain: the layers and their graphs.
        constants: the arguments that the graphs were captured with; a call with others runs eager.
        before_layers: asked before each forward for what to call with a layer's index before that layer;
            None for nothing.
    """

    def __init__(
        self,
        chain: Chain,
        constants: Constants,
        before_layers: Callable[[], Callable[[int], None] | None],
    ) -> None:
        self._specs = chain.specs
        self._sites = chain.sites
        self._replay_all = chain.replay_all
        self._constants = constants
        self.before_layers = before_layers
        # The running micro-batch. The loop sets its reason where the call's arguments are others.
        self.batch: RunningBatch | None = None

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Runs every layer: its graph, or itself where its site answers so."""
        assert self.batch is not None
        for name, value in arguments.items():
            if value is not self._constants.get(name) and not self._constants.is_equal(name, value):
                self.batch.reason = EagerReason.SIGNATURE_CHANGED
                self.batch.heed_table(arguments.get("rotary_pos_emb"), hidden_states)
                return self._run_eager(hidden_states, arguments), None
        before_layer = self.before_layers()
        if before_layer is None:
            out = self._replay_all(hidden_states)
            if out is not NotImplemented:
                return out, None
        return self._run_each(hidden_states, arguments, before_layer), None

    def _run_each(
        self, hidden_states: Tensor, arguments: Mapping[str, Any], before_layer: Callable[[int], None] | None
    ) -> Tensor:
        is_padded = False
        for index, site in enumerate(self._sites):
            if before_layer is not None:
                before_layer(index)
            out = site(hidden_states)
            if out is NotImplemented:
                given = hidden_states if is_padded else self._padded(hidden_states)
                out = self._run_layer(self._specs[index], given, arguments)
            hidden_states, is_padded = out, True
        return hidden_states

    def _run_eager(self, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        hidden_states = self._padded(hidden_states)
        for spec in self._specs:
            hidden_states = self._run_layer(spec, hidden_states, arguments)
        return hidden_states

    def _padded(self, hidden_states: Tensor) -> Tensor:
        assert self.batch is not None
        return self.batch.pad(hidden_states)

    def _run_layer(self, spec: SiteSpec, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        assert self.batch is not None
        canonical = {"attention_mask": None, "packed_seq_params": self.batch.canonical_params()}
        out = _hidden_states_of(spec.module, hidden_states, **{**arguments, **canonical})
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
