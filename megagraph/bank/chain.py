# SPDX-License-Identifier: Apache-2.0
"""A chain of sites: runs micro-batches on the graphs that a bank has captured for it."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from megagraph import _C
from megagraph.bank.sites import SiteSpec
from megagraph.decide.reasons import EagerReason

__all__ = ["Chain"]


class Chain:
    """Sites that run one after another and are captured together. Made by `Bank.add_chain()`.

    Args:
        core: the chain's C++ half.
        sites: in execution order.
        first_pool: the pool of its first slot; pools are counted over all chains of a bank.
    """

    def __init__(self, core: _C.Chain, sites: Sequence[SiteSpec], first_pool: int) -> None:
        self.core = core
        self.specs = tuple(sites)
        self.sites = tuple(core.site(index) for index in range(len(sites)))
        # All sites in one call and with one autograd node; `NotImplemented` where that cannot be.
        self.replay_all = core.replay_all()
        self.first_pool = first_pool
        # Of each variant the graphs in use, by index, and all that it has: of several numeric settings.
        self.variants: dict[Any, int] = {}
        self._captured: dict[Any, list[int]] = {}
        self._num_graphs: dict[int, int] = {}
        # What stays eager, and why: sites by index, and variants of which no site could be captured.
        self.eager_sites: dict[int, EagerReason] = {}
        self.eager_variants: dict[Any, EagerReason] = {}
        # Of each captured site: its parameters with main_grad, as the backward pass reaches them.
        self.gradient_order: dict[int, Sequence[Tensor]] = {}

    @property
    def num_slots(self) -> int:
        """Micro-batches that may be in flight at once."""
        return self.core.num_slots

    @property
    def num_graphs(self) -> int:
        """Graphs of all variants, forwards and backwards, in every slot."""
        return sum(self._num_graphs.values())

    def add(self, key: Any, index: int, num_graphs: int) -> None:
        """Takes note of graphs that a variant has from now on, and uses them."""
        self.variants[key] = index
        self._captured.setdefault(key, []).append(index)
        self._num_graphs[index] = num_graphs

    def drop(self, key: Any) -> None:
        """Releases every graph of a variant; the memory goes to later ones. `Bank.drop()` says when."""
        for index in self._captured.get(key, ()):
            self.core.drop_variant(index)
            del self._num_graphs[index]
        self._captured.pop(key, None)
        self.variants.pop(key, None)

    def use_current_settings(self) -> None:
        """Points each variant at its graphs of the numeric settings in force, where it has some."""
        for key, indices in self._captured.items():
            self.variants[key] = next(filter(self.has_current_settings, indices), self.variants[key])

    def graphable(self) -> Mapping[int, SiteSpec]:
        """The sites that do not stay eager, by index."""
        return {index: spec for index, spec in enumerate(self.specs) if index not in self.eager_sites}

    def keep_eager(self, index: int, reason: EagerReason) -> None:
        """Leaves one site eager, counted under `reason`."""
        self.eager_sites[index] = reason
        self.core.set_site_eager_reason(index, int(reason))

    def listen(self, wants: Callable[[], bool], done: Callable[[int], None]) -> None:
        """Reports finished backward passes, from autograd's threads.

        Args:
            wants: asked once for each micro-batch whether anybody wants to know.
            done: called with a site's index when every gradient of it is in its `main_grad`.
        """
        self.core.set_listener(wants, done)

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

    def begin(self, key: Hashable, sources: Sequence[Tensor] = ()) -> EagerReason | None:
        """Leases a slot, or answers why not; `end()` ends what this began."""
        index = self.variants.get(key)
        if index is None:
            return self.eager_variants.get(key, EagerReason.WARMING_UP)
        code = self.core.begin(index, sources)
        return None if code < 0 else EagerReason(code)

    def end(self) -> None:
        """Ends the running micro-batch; its slot is free when nobody holds a tensor or backward of it."""
        self.core.end()

    def holders(self) -> str:
        """Who holds slots, in words; empty where every slot is free."""
        return self.core.describe_holders()

    def has_current_settings(self, index: int) -> bool:
        """Whether a variant, by its index, was captured under the numeric settings now in force."""
        return not self.core.changed_setting(index)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Runs every site inside a micro-batch: its graph, or its module where that answers so."""
        out = self.replay_all(hidden)
        if out is not NotImplemented:
            return out
        for spec, site in zip(self.specs, self.sites, strict=True):
            out = site(hidden)
            hidden = spec.call(hidden) if out is NotImplemented else out
        return hidden
