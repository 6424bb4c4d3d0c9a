# SPDX-License-Identifier: Apache-2.0
"""Scope: the layers of a block whose forward is not Megatron's, each where the block calls it.

Such a block may work on the hidden states between two layers. So each layer is replaced by itself, and what
lies between sees as many rows as were given, and the pack as it was given.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megagraph.bank.chain import Chain
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.scopes.arguments import Constants
from megagraph.megatron.scopes.loop import LayerLoop, RunningBatch
from megagraph.megatron.scopes.mamba import given_to_mamba
from megagraph.megatron.scopes.plan import BlockPlan, LayerStep

__all__ = ["LayersOneByOne"]

_NAMED = ("hidden_states", "attention_mask", "packed_seq_params")


class GivenBatch(RunningBatch, Protocol):
    """What is asked of the micro-batch beside that."""

    params: Any

    def given_params(self, table: Any, hidden_states: Tensor) -> Any:
        """The pack as it was given, for a layer that is handed a rotary table."""
        ...

    def first_rows(self, hidden_states: Tensor) -> Tensor:
        """As many rows as were given, as a view."""
        ...


class LayersOneByOne:
    """Stands in for the forward of each layer while one micro-batch runs.

    A layer replays, or runs eager on the canonical pack as its site or the decision says. A call with other
    arguments than those of the capture runs as it was given.

    Args:
        batch: the micro-batch.
        plan: the steps of the layers.
        chain: of these steps, with their graphs.
        constants: the arguments of the capture.
        loop: of the variant that replays; None where the decision was to run eager.
        count_eager: counts a call that runs as given although the micro-batch replays.
    """

    def __init__(
        self,
        batch: GivenBatch,
        plan: BlockPlan,
        chain: Chain,
        constants: Constants,
        loop: LayerLoop | None,
        count_eager: Callable[[EagerReason], None],
    ) -> None:
        self._batch = batch
        self._plan = plan
        self._sites = chain.sites
        self._constants = constants
        self._replays = loop is not None
        self._before_site = None if loop is None else loop.before_sites()
        self._count_eager = count_eager
        # The rows that a layer handed out last, and all rows that they are a part of.
        self._cut: Tensor | None = None
        self._whole: Tensor | None = None
        self._is_replaying = False
        self.num_called = 0

    @contextlib.contextmanager
    def shadowing(self) -> Iterator[None]:
        """While inside, calls of the layers come here; hooks on them run as ever."""
        layers = self._plan.layers()
        before = [vars(layer).get("forward") for layer in layers]
        for index, layer in enumerate(layers):
            vars(layer)["forward"] = functools.partial(self._run, index, layer.forward)
        try:
            yield
        finally:
            for layer, forward in zip(layers, before, strict=True):
                _put_back(layer, forward)

    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_replaying:  # the host backend runs the layer again
            return forward(*args, **kwargs)
        self.num_called += 1
        given: Any = args[0] if args else kwargs.get("hidden_states")
        # Taken out first: whoever holds the last output keeps the next layer from staging.
        whole = self._whole if given is self._cut else None
        self._cut = self._whole = None
        arguments = {name: value for name, value in kwargs.items() if name not in _NAMED}
        if len(args) > 1 or not self._is_expected(index, kwargs, arguments):
            if self._replays:
                self._count_eager(EagerReason.SIGNATURE_CHANGED)
            if kwargs.get("packed_seq_params") is self._batch.params:
                table = kwargs.get("rotary_pos_emb")
                kwargs["packed_seq_params"] = self._batch.given_params(table, given)
            return forward(*args, **kwargs)
        steps = self._plan.steps_of(index)
        if self._before_site is not None:
            for site, _step in steps:
                if site >= 0:
                    self._before_site(site)
        if self._replays:
            if whole is None and index > 0:
                whole = self._batch.pad(given)
            out = self._replay(steps, given if whole is None else whole, arguments)
            if out is not NotImplemented:
                handed = self._handed_out(out)
                return handed if index in self._plan.mamba_layers else (handed, None)
        return self._run_eager(index, forward, self._batch.pad(given) if whole is None else whole, arguments)

    def _replay(
        self, steps: Sequence[tuple[int, LayerStep]], hidden_states: Any, arguments: Mapping[str, Any]
    ) -> Any:
        """Of a layer that is one step, `NotImplemented` where its site answers so."""
        is_first = True
        for index, step in steps:
            out = NotImplemented if index < 0 else self._replay_site(index, hidden_states)
            if out is NotImplemented:
                if step.is_whole:
                    return out
                given = self._batch.pad(hidden_states) if is_first else hidden_states
                out = step.run_eager(given, {**arguments, **self._canonical()})
            hidden_states, is_first = out, False
        return hidden_states

    def _replay_site(self, index: int, hidden_states: Tensor) -> Any:
        self._is_replaying = True
        try:
            return self._sites[index](hidden_states)
        finally:
            self._is_replaying = False

    def _canonical(self) -> dict[str, Any]:
        canonical = {"attention_mask": None, "packed_seq_params": self._batch.canonical_params()}
        mask = self._batch.canonical_mask()
        return canonical if mask is None else {**canonical, "padding_mask": mask}

    def _is_expected(self, index: int, kwargs: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
        if (
            kwargs.get("attention_mask") is not None
            or kwargs.get("packed_seq_params") is not self._batch.params
        ):
            return False
        if index in self._plan.mamba_layers:  # whatever the block hands to its other layers
            return all(value is None for value in arguments.values())
        return self._constants.are(arguments)

    def _run_eager(
        self, index: int, forward: Callable[..., Any], whole: Tensor, arguments: Mapping[str, Any]
    ) -> Any:
        canonical = {**arguments, **self._canonical()}
        if index in self._plan.mamba_layers:
            canonical = given_to_mamba(canonical)
        out = forward(hidden_states=whole, **canonical)
        hidden, further = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
        # Megatron adds residuals with gradients switched on, also where the caller has them off.
        handed = self._handed_out(hidden if torch.is_grad_enabled() else hidden.detach())
        return handed if further is None else (handed, *further)

    def _handed_out(self, whole: Tensor) -> Tensor:
        self._whole, self._cut = whole, self._batch.first_rows(whole)
        return self._cut


def _put_back(layer: nn.Module, forward: Any) -> None:
    if forward is None:
        del vars(layer)["forward"]
    else:
        vars(layer)["forward"] = forward
