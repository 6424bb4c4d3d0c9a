# SPDX-License-Identifier: Apache-2.0
"""A chain of sites: runs micro-batches on the graphs that a bank has captured for it."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagraph import _C
from megagraph.bank.backends import Notes
from megagraph.bank.sites import ChainShape, EagerPart, SiteSpec, VariantSpec
from megagraph.decide.reasons import EagerReason

__all__ = ["CapturedVariant", "Chain"]


@dataclass(frozen=True, eq=False)
class CapturedVariant:
    """What a variant was captured for, so that a call of it can run eager as its graph would.

    Args:
        spec: as it was given.
        buffers: its metadata buffers, by slot and name.
        num_graphs: forwards and backwards, in every slot.
        notes: of each slot.
    """

    spec: VariantSpec
    buffers: Sequence[Mapping[str, Tensor]]
    num_graphs: int
    notes: Sequence[Notes]

    def arguments(self, slot: int, sources: Sequence[Tensor]) -> Mapping[str, Any]:
        """The arguments of a call, over the metadata of its micro-batch in memory of their own."""
        end = None if self.spec.end_source < 0 else sources[self.spec.end_source].flatten()[-1:]
        contents = {
            name: metadata.content(self.buffers[slot][name], sources, end)
            for name, metadata in self.spec.metadata.items()
        }
        return self.spec.arguments(contents)

    def staged(self, hidden: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """The chain's input as staging would write it: in the captured rows, zero past the pack's end.

        Where only as many rows as were captured may be given, others stay as they are.
        """
        rows = max(self.spec.rows, hidden.shape[0]) if self.spec.fewer_rows else hidden.shape[0]
        if self.spec.end_source >= 0:
            offsets = sources[self.spec.end_source]
            out: Tensor = torch.ops.megagraph.zero_tail(hidden, offsets, rows)
            return out
        missing = rows - hidden.shape[0]
        return hidden if missing == 0 else torch.cat([hidden, hidden.new_zeros(missing, *hidden.shape[1:])])


def _cannot(hidden: Tensor) -> Any:
    return NotImplemented


class Chain:
    """Sites that run one after another and are captured together. Made by `Bank.add_chain()`.

    Args:
        core: the chain's C++ half.
        steps: sites, and what stays eager around them, in execution order.
        first_pool: the pool of its first slot; pools are counted over all chains of a bank.
        holds_collectives: its graphs do.
    """

    def __init__(
        self,
        core: _C.Chain,
        steps: Sequence[SiteSpec | EagerPart],
        first_pool: int,
        holds_collectives: bool,
    ) -> None:
        self.core = core
        self.holds_collectives = holds_collectives
        self.steps = tuple(steps)
        self.shape = ChainShape.of(steps)
        self.specs = tuple(step for step in steps if isinstance(step, SiteSpec))
        self.sites = tuple(core.site(index) for index in range(len(self.specs)))
        # All steps in one call and with one autograd node; `NotImplemented` where that cannot be.
        self.replay_all = core.replay_all() if len(self.specs) == len(self.steps) else _cannot
        self.first_pool = first_pool
        # The graphs in use of each variant, by index, and all that there are: of several numeric settings.
        self.variants: dict[Any, int] = {}
        self.captured: dict[int, CapturedVariant] = {}
        # The running micro-batch's, for its calls that run eager.
        self._running: tuple[CapturedVariant, Sequence[Tensor]] | None = None
        # What stays eager, and why: sites by index, and variants of which no site could be captured.
        self.eager_sites: dict[int, EagerReason] = {}
        self.eager_variants: dict[Any, EagerReason] = {}
        # Of each captured site: its parameters with main_grad, as the backward pass reaches them.
        self.gradient_order: dict[int, Sequence[Tensor]] = {}
        self._listener: tuple[Callable[[], bool], Callable[[int, int], None], Sequence[int]] | None = None

    @property
    def num_slots(self) -> int:
        """Micro-batches that may be in flight at once."""
        return self.core.num_slots

    @property
    def num_graphs(self) -> int:
        """Graphs of all variants, forwards and backwards, in every slot."""
        return sum(variant.num_graphs for variant in self.captured.values())

    def add(self, index: int, variant: CapturedVariant) -> None:
        """Takes note of graphs that a variant has from now on, and uses them."""
        self.variants[variant.spec.key] = index
        self.captured[index] = variant

    def _captured_for(self, key: Any) -> list[int]:
        return [index for index, variant in self.captured.items() if variant.spec.key == key]

    def drop(self, key: Any) -> None:
        """Releases every graph of a variant; the memory goes to later ones. `Bank.drop()` says when."""
        for index in self._captured_for(key):
            self.core.drop_variant(index)
            del self.captured[index]
        self.variants.pop(key, None)

    def use_current_settings(self) -> None:
        """Points each variant at its graphs of the numeric settings in force, where it has some."""
        changed = self.core.changed_setting
        for key, used in self.variants.items():
            if changed(used):
                fitting = filter(self.has_current_settings, self._captured_for(key))
                self.variants[key] = next(fitting, used)

    def graphable(self) -> Mapping[int, SiteSpec]:
        """The sites that do not stay eager, by index."""
        return {index: spec for index, spec in enumerate(self.specs) if index not in self.eager_sites}

    def keep_eager(self, index: int, reason: EagerReason) -> None:
        """Leaves one site eager, counted under `reason`."""
        self.eager_sites[index] = reason
        self.core.set_site_eager_reason(index, int(reason))

    def listen(
        self, wants: Callable[[], bool], done: Callable[[int, int], None], noticed: Sequence[int]
    ) -> None:
        """Reports finished backward passes, from whatever thread runs them.

        Args:
            wants: asked once for each micro-batch whether anybody wants to know.
            done: called with the first and the last of some sites that follow one another, when all of
                their gradients are in `main_grad`; each site is told once.
            noticed: the sites after whose backward `done` is called at once. At the end of each autograd
                node it is called for what is left.
        """
        self._listener = wants, done, noticed
        self.core.set_listener(*self._listener)

    @contextlib.contextmanager
    def without_listener(self) -> Iterator[None]:
        """Around backward passes that nobody is told of."""
        if self._listener is None:
            yield
            return
        self.core.set_listener(lambda: False, lambda *_: None, [])
        try:
            yield
        finally:
            self.core.set_listener(*self._listener)

    @contextlib.contextmanager
    def micro_batch(self, key: Hashable, sources: Sequence[Tensor] = ()) -> Iterator[EagerReason | None]:
        """Runs one micro-batch on a slot of variant `key`; yields None, or why there is none.

        Args:
            key: the variant.
            sources: metadata as the variant's `MetadataSpec`s name it, on the chain's device.
        """
        reason = self.begin(key, sources)
        try:
            yield reason
        finally:
            if reason is None:
                self.end()

    def begin(
        self, key: Hashable, sources: Sequence[Tensor] = (), *, look_at_grads: bool = True
    ) -> EagerReason | None:
        """Leases a slot, or answers why not; `end()` ends what this began.

        Args:
            key: the variant.
            sources: metadata, as `micro_batch()` takes it.
            look_at_grads: False where it is known that no parameter holds a `.grad` beside `main_grad`,
                which eager would add as well.
        """
        index = self.variants.get(key)
        if index is None:
            return self.eager_variants.get(key, EagerReason.WARMING_UP)
        code = self.core.begin(index, sources, look_at_grads)
        if code >= 0:
            return EagerReason(code)
        self._running = self.captured[index], sources
        return None

    def end(self) -> None:
        """Ends the running micro-batch; its slot is free when nobody holds a tensor or backward of it."""
        self._running = None
        self.core.end()

    def holders(self) -> str:
        """Who holds slots, in words; empty where every slot is free."""
        return self.core.describe_holders()

    def has_current_settings(self, index: int) -> bool:
        """Whether a variant, by its index, was captured under the numeric settings now in force."""
        return not self.core.changed_setting(index)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Runs every step inside a micro-batch: a site's graph, or its module where that answers so.

        What is eager runs as its graph would: on the captured rows, with the variant's arguments over the
        micro-batch's own metadata.
        """
        out = self.replay_all(hidden)
        if out is not NotImplemented:
            return out
        given: Any = hidden
        arguments: Mapping[str, Any] | None = None  # of what is eager: made once
        try:
            sites = iter(zip(self.specs, self.sites, strict=True))
            for place, step in enumerate(self.steps):
                site = None if isinstance(step, EagerPart) else next(sites)[1]
                next_given: Any = NotImplemented if site is None else site(given)
                if next_given is NotImplemented:
                    if arguments is None:
                        arguments = self._arguments()
                    next_given = step.call(self._staged(given) if place == 0 else given, **arguments)
                given = next_given
        except BaseException:
            given = next_given = None  # the traceback keeps this frame, and would keep a slot
            raise
        result: Tensor = given
        return result

    def _arguments(self) -> Mapping[str, Any]:
        assert self._running is not None  # a site would have raised
        variant, sources = self._running
        return variant.arguments(self.core.slot_index, sources)

    def _staged(self, hidden: Tensor) -> Tensor:
        assert self._running is not None
        variant, sources = self._running
        return variant.staged(hidden, sources)
