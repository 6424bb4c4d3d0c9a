# SPDX-License-Identifier: Apache-2.0
"""Reads packs as they are given: what their shapes and host integers say, whatever state the model is in."""

from megagraph import _C
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.graphs.capacities import Capacities
from megagraph.packs.packing import PackForm, TailConvention

__all__ = ["GivenPack", "PackReader"]

GivenPack = _C.GivenPack


class PackReader(_C.PackReader):
    """Reads the packs of one model, in C++: `read(params, tokens)`.

    It answers with a `GivenPack`, whose capacity is None while capacities are still to be learned, or with
    the `EagerReason` why no graph of the model can take the micro-batch.

    Args:
        capacities: of the model's graphs.
        tail: the convention of its canonical packs.
    """

    def __init__(self, capacities: Capacities, tail: TailConvention) -> None:
        super().__init__(tail.extra_seqs, list(EagerReason), PackForm)
        self._capacities = capacities
        self.follow()

    def follow(self) -> None:
        """Takes note of capacities that were learned."""
        known = self._capacities.known
        self.set_capacities({1: known} if known else {})
