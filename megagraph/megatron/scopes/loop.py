# SPDX-License-Identifier: Apache-2.0
"""Walks the steps of a block in place of its layers, while a micro-batch replays.

Megatron's loop over the layers costs 12 us a layer. So where a micro-batch replays, the block's `layers`
are shadowed by one callable that runs them all, in one go where it can; the rest of the block's forward
(its contexts, the final norm) stays Megatron's own.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from megagraph.bank.chain import Chain
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.scopes.arguments import Constants
from megagraph.megatron.scopes.plan import BlockPlan, LayerStep

__all__ = ["LayerLoop", "RunningBatch"]


class RunningBatch(Protocol):
    """What the loop asks of the micro-batch that it runs."""

    reason: EagerReason | None
    mask: Tensor | None

    def heed_table(self, table: Any, hidden_states: Tensor) -> None:
        """Takes note of a rotary table that is not the capture's."""
        ...

    def pad(self, hidden_states: Tensor) -> Tensor:
        """The hidden states of the canonical pack."""
        ...

    def canonical_params(self) -> Any:
        """The canonical pack."""
        ...

    def replace_mask(self, mask: Tensor | None) -> None:
        """Takes another padding mask, or none, in place of the one that there is."""
        ...

    def canonical_mask(self) -> Tensor | None:
        """Its padding mask."""
        ...


class LayerLoop:
    """Stands in for all layers of a block while a micro-batch of one variant replays.

    Args:
        plan: the steps of the layers.
        chain: of these steps, with their graphs.
        constants: the arguments that the graphs were captured with; a call with others runs eager.
        before_sites: asked before each forward for what to call with a site's index before that site;
            None for nothing.
    """

    def __init__(
        self,
        plan: BlockPlan,
        chain: Chain,
        constants: Constants,
        before_sites: Callable[[], Callable[[int], None] | None],
    ) -> None:
        self._plan = plan
        self._steps = plan.walk(chain.eager_sites)
        self._sites = chain.sites
        self._replay_all = chain.replay_all
        self._constants = constants
        self.before_sites = before_sites
        # The running micro-batch. The loop sets its reason where the call's arguments are others.
        self.batch: RunningBatch | None = None

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Runs every layer: its graph, or itself where its site answers so."""
        assert self.batch is not None
        is_other = padding_mask is not self.batch.mask  # which is staged
        if is_other:
            self.batch.replace_mask(padding_mask)
        for name, value in arguments.items():
            is_other = is_other or (
                value is not self._constants.get(name) and not self._constants.is_equal(name, value)
            )
        if is_other:
            self.batch.reason = EagerReason.SIGNATURE_CHANGED
            self.batch.heed_table(arguments.get("rotary_pos_emb"), hidden_states)
            return self._run_eager(hidden_states, arguments), None
        before_site = self.before_sites()
        if before_site is None:
            out = self._replay_all(hidden_states)
            if out is not NotImplemented:
                return out, None
        return self._run_each(hidden_states, arguments, before_site), None

    def _run_each(
        self, hidden_states: Any, arguments: Mapping[str, Any], before_site: Callable[[int], None] | None
    ) -> Tensor:
        is_padded, sites = False, iter(enumerate(self._sites))
        out: Any = None
        try:
            for step in self._steps:
                out = NotImplemented
                if step.is_site:
                    index, site = next(sites)
                    if before_site is not None:
                        before_site(index)
                    out = site(hidden_states)
                if out is NotImplemented:
                    if not is_padded:
                        hidden_states = self._padded(hidden_states)
                    out = self._run_step(step, hidden_states, arguments)
                hidden_states, is_padded = out, True
            result: Tensor = hidden_states
            return result
        except BaseException:
            hidden_states = out = None  # the traceback keeps this frame, and would keep a slot
            raise

    def _run_eager(self, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        hidden_states = self._padded(hidden_states)
        for layer in self._plan.whole_layers():
            hidden_states = self._run_step(layer, hidden_states, arguments)
        return hidden_states

    def _padded(self, hidden_states: Tensor) -> Tensor:
        assert self.batch is not None
        return self.batch.pad(hidden_states)

    def _run_step(self, step: LayerStep, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        batch = self.batch
        assert batch is not None
        canonical = {"attention_mask": None, "packed_seq_params": batch.canonical_params()}
        mask = batch.canonical_mask()
        if mask is not None:
            canonical["padding_mask"] = mask
        out: Tensor = step.run_eager(hidden_states, {**arguments, **canonical})
        return out
