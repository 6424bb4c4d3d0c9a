# SPDX-License-Identifier: Apache-2.0
"""A chain of sites: runs micro-batches on the graphs that a bank has captured for it."""

import contextlib
from collections.abc import Hashable, Iterator, Sequence

from torch import Tensor, nn

from megagraph import _C
from megagraph.dispatch import EagerReason
from megagraph.sites import SiteSpec

__all__ = ["Chain"]


class Chain:
    """Sites that run one after another, captured as one chunk. Made by `Bank.add_chain()`."""

    def __init__(self, chunk: _C.Chunk, sites: Sequence[SiteSpec], first_pool: int, num_slots: int) -> None:
        self.chunk = chunk
        self.specs = tuple(sites)
        self.sites = tuple(chunk.site(rank) for rank in range(len(sites)))
        self.run = chunk.run()
        self.skipped: dict[int, EagerReason] = {}
        self.variants: dict[Hashable, int] = {}
        # Variants of which no site could be captured, and why the first one could not.
        self.uncapturable: dict[Hashable, EagerReason] = {}
        # Of each captured rank: its parameters with main_grad, as the backward pass reaches them.
        self.gradient_order: dict[int, Sequence[nn.Parameter]] = {}
        self.first_pool = first_pool
        self.num_slots = num_slots

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
                self.chunk.end()

    def begin(self, key: Hashable, sources: Sequence[Tensor] = ()) -> EagerReason | None:
        """Leases a slot, or answers why not; `chunk.end()` ends what this began."""
        index = self.variants.get(key)
        if index is None:
            return self.uncapturable.get(key, EagerReason.WARMING_UP)
        code = self.chunk.begin(index, sources)
        return None if code < 0 else EagerReason(code)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Runs every site inside a micro-batch: its graph, or its module where that answers so."""
        out = self.run(hidden)
        if out is not NotImplemented:
            return out
        for spec, site in zip(self.specs, self.sites, strict=True):
            out = site(hidden)
            hidden = spec.call(hidden) if out is NotImplemented else out
        return hidden
