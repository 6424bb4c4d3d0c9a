# SPDX-License-Identifier: Apache-2.0
"""Walks the steps of a block in place of its layers, while a micro-batch replays.

Megatron's loop over the layers costs 12 us a layer. So one callable stands in for them all, and runs them in
one go if it can; the rest of the block's forward (its contexts, the final norm) stays Megatron's own. If that
is not Megatron's, each layer is replaced by itself, and what lies between sees as many rows as were given,
and the pack as it was given.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from megagraph._C import Site
from megagraph.megatron.graphs.captures import Captures
from megagraph.megatron.graphs.dispatcher import MicroBatch
from megagraph.megatron.scopes.parts import given_to_mamba, is_mamba
from megagraph.megatron.scopes.plan import LayerStep
from megagraph.megatron.seams import stand_in
from megagraph.reasons import EagerReason

__all__ = ["LayerLoop", "LayersOneByOne"]


def _walk(
    steps: Iterable[LayerStep],
    sites: Sequence[Site],
    batch: MicroBatch,
    hidden_states: Any,
    arguments: Mapping[str, Any],
    before_site: Callable[[int], None] | None,
    *,
    is_padded: bool,
) -> Tensor:
    """Runs steps, each on what the one before hands on: its graph, if it is one of the sites, or eager.

    `before_site` is called with a site's index before that site. Rows that are not padded yet are what was
    given, which a graph's staging pads.
    """
    out: Any = None
    try:
        for step in steps:
            out = NotImplemented
            if sites and step.site is not None:
                if before_site is not None:
                    before_site(step.site)
                out = sites[step.site](hidden_states)
            if out is NotImplemented:
                if not is_padded:
                    hidden_states = batch.pad(hidden_states)
                out = step.run_eager(hidden_states, {**arguments, **batch.layer_arguments()})
            hidden_states, is_padded = out, True
        result: Tensor = hidden_states
        return result
    except BaseException:
        hidden_states = out = None  # the traceback keeps this frame, and would keep a slot
        raise


class LayerLoop:
    """Stands in for all layers of a block while one micro-batch replays.

    A call with other arguments than those of the capture runs eager.
    """

    layer_number = 1  # read for the context of fp8, which is refused

    def __init__(self, captures: Captures, batch: MicroBatch, variant: int) -> None:
        self._captures, self._batch = captures, batch
        self._constants, self._steps = captures.constants[variant], captures.steps[variant]
        self.kept: Mapping[str, Any] = {}  # of its block's arguments those that the call is not given

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """Runs every layer: its graph, or itself where its site answers so."""
        captures, batch, arguments = self._captures, self._batch, {**self.kept, **given}
        padding_mask = arguments.pop("padding_mask", None)
        sites, of_layers = captures.bank.sites, self._steps
        before_site = captures.before_sites and captures.before_sites()
        # The mask of the micro-batch is staged.
        if padding_mask is not batch.mask or not self._constants.hold(arguments):
            table = arguments.get("rotary_pos_emb")
            captures.dispatcher.turn_eager(self._constants, batch, hidden_states, table, padding_mask)
            sites, of_layers = (), captures.plan.walk(())
        elif before_site is None:
            out = captures.bank.replay_all(hidden_states)
            if out is not NotImplemented:
                return out, None
        steps = itertools.chain.from_iterable(of_layers.values())
        return _walk(steps, sites, batch, hidden_states, arguments, before_site, is_padded=False), None


_NAMED = ("hidden_states", "attention_mask", "packed_seq_params")


class LayersOneByOne:
    """Stands in for the forward of each layer while one micro-batch runs.

    A layer replays, or runs eager on the canonical pack as its site or the decision says. A call with other
    arguments than those of the capture runs as it was given, if it does on all ranks that share the pack, and
    is counted if the micro-batch replays a `variant`.
    """

    def __init__(self, captures: Captures, batch: MicroBatch, variant: int | None) -> None:
        self._captures, self._batch, self._replays = captures, batch, variant is not None
        self._constants = captures.arguments[batch.key]
        self._steps = captures.plan.walk(()) if variant is None else captures.steps[variant]
        self._before_site = captures.before_sites() if self._replays and captures.before_sites else None
        # The rows that a layer handed out last, and all rows that they are a part of.
        self._cut: Tensor | None = None
        self._whole: Tensor | None = None
        self._is_running = False
        self.num_called = 0

    @contextlib.contextmanager
    def shadowing(self) -> Iterator[None]:
        """While inside, calls of the layers come here; hooks on them run as ever."""
        with contextlib.ExitStack() as afterwards:
            plan = self._captures.plan
            for index, layer in enumerate(plan.layers()):
                run = functools.partial(self._run, index, is_mamba(layer), layer.forward)
                afterwards.enter_context(stand_in(layer, forward=run))
            yield

    def _run(self, index: int, is_mamba: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_running:  # the host backend runs the layer again
            return forward(*args, **kwargs)
        self.num_called += 1
        given: Any = args[0] if args else kwargs.get("hidden_states")
        # Taken out first: whoever holds the last output keeps the next layer from staging.
        whole = self._whole if given is self._cut else None
        self._cut = self._whole = None
        arguments = {name: value for name, value in kwargs.items() if name not in _NAMED}
        if len(args) > 1 or not self._is_expected(is_mamba, kwargs, arguments):
            bank, reason = self._captures.bank, EagerReason.SIGNATURE_CHANGED
            bank.run_eager_alike(bank.variants.get(self._batch.key, -1), -2 - index, reason)
            if self._replays:
                bank.count_eager(reason, calls=1)
            if kwargs.get("packed_seq_params") is self._batch.params:
                is_own = self._batch.is_own(kwargs.get("rotary_pos_emb"), given)
                kwargs["packed_seq_params"] = self._batch.given_params(is_own_table=is_own)
            return forward(*args, **kwargs)
        further: tuple[Any, ...] | None = None if is_mamba else (None,)

        def run_forward(_layer: Any, before: Tensor, arguments: Mapping[str, Any]) -> Tensor:
            nonlocal further
            out = forward(hidden_states=before, **(given_to_mamba(arguments) if is_mamba else arguments))
            hidden: Tensor
            hidden, further = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
            return hidden

        steps = self._steps[index]
        if not steps[0].parts:  # all of it is its own forward: the call, with its hooks, is what came here
            steps = [dataclasses.replace(steps[0], run=run_forward)]
        if whole is None and index > 0:
            whole = self._batch.pad(given)
        self._is_running, bank = True, self._captures.bank
        try:
            out = _walk(
                steps,
                bank.sites if self._replays else (),
                self._batch,
                given if whole is None else whole,
                arguments,
                self._before_site,
                is_padded=whole is not None,
            )
        finally:
            self._is_running = False
        self._whole, self._cut = out, self._batch.first_rows(out)
        return self._cut if further is None else (self._cut, *further)

    def _is_expected(self, is_mamba: bool, kwargs: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
        has_its_pack = kwargs.get("packed_seq_params") is self._batch.params
        if kwargs.get("attention_mask") is not None or not has_its_pack:
            return False
        if is_mamba:  # whatever the block hands to its other layers
            return all(value is None for value in arguments.values())
        return self._constants.are(arguments)
