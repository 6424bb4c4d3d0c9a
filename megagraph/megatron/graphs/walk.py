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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from megagraph._C import Constants, VariantKey
from megagraph.bank.bank import Bank
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.graphs.dispatcher import Dispatcher, MicroBatch
from megagraph.megatron.scopes.parts import given_to_mamba, run_layer
from megagraph.megatron.scopes.plan import BlockPlan, LayerStep, without_history
from megagraph.megatron.seams import stand_in

__all__ = ["LayerLoop", "LayersOneByOne"]

BeforeSite = Callable[[int], None] | None


def _walk(
    steps: Sequence[LayerStep],
    loop: "LayerLoop | None",
    batch: MicroBatch,
    hidden_states: Any,
    arguments: Mapping[str, Any],
    before_site: BeforeSite,
    *,
    is_padded: bool,
) -> Tensor:
    """Runs steps, each on what the one before hands on: its graph, if there is a loop, or eager.

    `before_site` is called with a site's index before that site. Rows that are not padded yet are what was
    given, which a graph's staging pads.
    """
    out: Any = None
    try:
        for step in steps:
            out = NotImplemented
            if loop is not None and step.site is not None:
                if before_site is not None:
                    before_site(step.site)
                out = loop.sites[step.site](hidden_states)
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
    """Stands in for all layers of a block while a micro-batch of one variant replays.

    Calls with other arguments than `constants`, those of the capture, run eager. `before_sites` is asked in
    each forward for what to call with a site's index before that site; it is None if nothing ever is.
    """

    layer_number = 1  # read for the context of fp8, which is refused

    def __init__(
        self,
        key: VariantKey,
        plan: BlockPlan,
        bank: Bank,
        constants: Constants,
        before_sites: Callable[[], BeforeSite] | None,
        dispatcher: Dispatcher,
    ) -> None:
        self.key, self._plan, self._steps = key, plan, plan.walk(bank.eager_sites)
        self._of_layers: dict[int, list[LayerStep]] = {}
        for step in self._steps:
            self._of_layers.setdefault(step.layer, []).append(step)
        self.sites = bank.sites
        self._replay_all = bank.replay_all
        self._turn_eager = dispatcher.turn_eager
        self.constants, self.before_sites = constants, before_sites
        # The running micro-batch. It turns eager where the call's arguments are others.
        self.batch: MicroBatch | None = None
        self.kept: Mapping[str, Any] = {}  # of its block's arguments those that the call is not given

    def steps_of(self, layer: int) -> Sequence[LayerStep]:
        """Of a layer that is not joined with others; one, if its site has no graph."""
        return self._of_layers[layer]

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """Runs every layer: its graph, or itself where its site answers so."""
        batch, arguments = self.batch, {**self.kept, **given}
        assert batch is not None
        padding_mask = arguments.pop("padding_mask", None)
        # The mask of the micro-batch is staged.
        if padding_mask is not batch.mask or not self.constants.hold(arguments):
            self._turn_eager(batch, hidden_states, arguments.get("rotary_pos_emb"), padding_mask)
            hidden_states, arguments = batch.pad(hidden_states), arguments | batch.layer_arguments()
            for layer in self._plan.layers():
                hidden_states = without_history(run_layer(layer, hidden_states, arguments))
            return hidden_states, None
        before_site = self.before_sites and self.before_sites()
        if before_site is None:
            out = self._replay_all(hidden_states)
            if out is not NotImplemented:
                return out, None
        return _walk(self._steps, self, batch, hidden_states, arguments, before_site, is_padded=False), None


_NAMED = ("hidden_states", "attention_mask", "packed_seq_params")


class LayersOneByOne:
    """Stands in for the forward of each layer while one micro-batch runs.

    A layer replays, or runs eager on the canonical pack as its site or the decision says. A call with other
    arguments than those of the capture runs as it was given, if it does on all ranks that share the pack, and
    is counted if the micro-batch replays, in the `loop` of its variant.
    """

    def __init__(
        self,
        batch: MicroBatch,
        plan: BlockPlan,
        constants: Constants,
        loop: LayerLoop | None,
        bank: Bank,
    ) -> None:
        self._batch, self._plan, self._constants, self._loop = batch, plan, constants, loop
        self._before_site = loop.before_sites() if loop is not None and loop.before_sites else None
        self._bank = bank
        # The rows that a layer handed out last, and all rows that they are a part of.
        self._cut: Tensor | None = None
        self._whole: Tensor | None = None
        self._is_running = False
        self.num_called = 0

    @contextlib.contextmanager
    def shadowing(self) -> Iterator[None]:
        """While inside, calls of the layers come here; hooks on them run as ever."""
        with contextlib.ExitStack() as afterwards:
            for index, layer in enumerate(self._plan.layers()):
                run = functools.partial(self._run, index, layer.forward)
                stand_in(afterwards, layer, "forward", run)
            yield

    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_running:  # the host backend runs the layer again
            return forward(*args, **kwargs)
        self.num_called += 1
        given: Any = args[0] if args else kwargs.get("hidden_states")
        # Taken out first: whoever holds the last output keeps the next layer from staging.
        whole = self._whole if given is self._cut else None
        self._cut = self._whole = None
        arguments = {name: value for name, value in kwargs.items() if name not in _NAMED}
        is_mamba = index in self._plan.mamba_layers
        if len(args) > 1 or not self._is_expected(is_mamba, kwargs, arguments):
            bank, reason = self._bank, EagerReason.SIGNATURE_CHANGED
            bank.run_eager_alike(bank.variants.get(self._batch.key, -1), -2 - index, reason)
            if self._loop is not None:
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

        if whole is None and index > 0:
            whole = self._batch.pad(given)
        self._is_running = True
        try:
            out = _walk(
                self._steps(index, run_forward),
                self._loop,
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

    def _steps(self, index: int, run_forward: Callable[..., Tensor]) -> list[LayerStep]:
        """Of a layer. All of it is its own forward: the call, with its hooks, is what came here."""
        first, *further = self._plan.steps_of(index) if self._loop is None else self._loop.steps_of(index)
        if self._loop is not None and not first.is_whole:
            return [first, *further]
        return [dataclasses.replace(first, run=run_forward)]

    def _is_expected(self, is_mamba: bool, kwargs: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
        if (
            kwargs.get("attention_mask") is not None
            or kwargs.get("packed_seq_params") is not self._batch.params
        ):
            return False
        if is_mamba:  # whatever the block hands to its other layers
            return all(value is None for value in arguments.values())
        return self._constants.are(arguments)
