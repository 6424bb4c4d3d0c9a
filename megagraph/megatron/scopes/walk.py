# SPDX-License-Identifier: Apache-2.0
"""Walks the steps of a block in place of its layers, while a micro-batch replays.

Megatron's loop over the layers costs 12 us a layer. So where a micro-batch replays, the block's `layers`
are shadowed by one callable that runs them all, in one go where it can; the rest of the block's forward
(its contexts, the final norm) stays Megatron's own. A block whose forward is not Megatron's may work on the
hidden states between two layers. There each layer is replaced by itself, and what lies between sees as many
rows as were given, and the pack as it was given.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megagraph.bank.bank import Bank
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.scopes.parts import given_to_mamba
from megagraph.megatron.scopes.plan import BlockPlan, LayerStep

__all__ = ["Constants", "LayerLoop", "LayersOneByOne", "RunningBatch"]


class Constants(dict[str, Any]):
    """Arguments that a variant's graphs were captured with, by name. None is left out."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        # The last tensor that equalled a constant, by name.
        self._equal: dict[str, Tensor] = {}

    def are(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call has just these arguments; None is as good as none."""
        given = {name: value for name, value in arguments.items() if value is not None}
        return given.keys() == self.keys() and all(
            value is self[name] or self.is_equal(name, value) for name, value in given.items()
        )

    def is_equal(self, name: str, value: Any) -> bool:
        """Whether an argument that is another object equals the one of the capture.

        Megatron keeps 32 rotary tables, over all models, and makes one that it dropped anew: an equal
        tensor is compared once, which waits for the device, and known from then on.
        """
        known = self.get(name)
        if value is not None and value is self._equal.get(name):
            return True
        if not (isinstance(value, Tensor) and isinstance(known, Tensor)):
            return False
        if value.shape != known.shape or value.dtype != known.dtype or not torch.equal(value, known):
            return False
        self._equal[name] = value
        return True


class RunningBatch(Protocol):
    """What the loop asks of the micro-batch that it runs."""

    reason: EagerReason | None
    mask: Tensor | None

    def is_own(self, table: Any, hidden_states: Tensor) -> bool:
        """Whether the model has made a rotary table."""
        ...

    def run_as_given(self, *, is_own_table: bool) -> None:
        """Lets the layers run on the pack as it was given."""
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
        bank: of these steps, with their graphs.
        constants: the arguments that the graphs were captured with; a call with others runs eager.
        before_sites: asked before each forward for what to call with a site's index before that site;
            None for nothing.
    """

    def __init__(
        self,
        plan: BlockPlan,
        bank: Bank,
        constants: Constants,
        before_sites: Callable[[], Callable[[int], None] | None],
    ) -> None:
        self._plan = plan
        self._steps = plan.walk(bank.eager_sites)
        self._sites = bank.sites
        self._replay_all = bank.replay_all
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
            if not self.batch.is_own(arguments.get("rotary_pos_emb"), hidden_states):
                self.batch.run_as_given(is_own_table=False)
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


_NAMED = ("hidden_states", "attention_mask", "packed_seq_params")


class GivenBatch(RunningBatch, Protocol):
    """What is asked of the micro-batch beside that."""

    params: Any

    def given_params(self, *, is_own_table: bool) -> Any:
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
        bank: of these steps, with their graphs.
        constants: the arguments of the capture.
        loop: of the variant that replays; None where the decision was to run eager.
        count_eager: counts a call that runs as given although the micro-batch replays.
    """

    def __init__(
        self,
        batch: GivenBatch,
        plan: BlockPlan,
        bank: Bank,
        constants: Constants,
        loop: LayerLoop | None,
        count_eager: Callable[[EagerReason], None],
    ) -> None:
        self._batch = batch
        self._plan = plan
        self._sites = bank.sites
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
                is_own = self._batch.is_own(kwargs.get("rotary_pos_emb"), given)
                kwargs["packed_seq_params"] = self._batch.given_params(is_own_table=is_own)
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
