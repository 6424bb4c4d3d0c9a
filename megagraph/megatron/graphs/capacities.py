# SPDX-License-Identifier: Apache-2.0
"""The capacities of one model: as configured, or learned from the packs of its warm-up."""

import dataclasses
from collections.abc import Callable
from typing import Any

from megagraph.bank.agreement import Exchange
from megagraph.config import GraphConfig
from megagraph.decide.dispatch import Capacity, PackShape
from megagraph.decide.learn import Needs, capacities_for, needs_of
from megagraph.log import log
from megagraph.packs.packing import pack_shape

__all__ = ["Capacities"]

_PATIENCE = 20  # steps that this rank waits for another one until it says so


class Capacities:
    """What packs the graphs of one model can hold.

    Args:
        config: the plugin's options.
        cp_size: ranks that share each pack.

    Attributes:
        cp_size: as given.
        known: smallest first; empty while they are still to be learned.
    """

    def __init__(self, config: GraphConfig, cp_size: int = 1) -> None:
        self.known = config.all_capacities(cp_size)
        self.cp_size = cp_size
        self._tail, self._extra_seqs = config.tail, config.tail.extra_seqs
        self._observed: set[PackShape] = set()
        self._waited = 0  # steps

    def check(self, rows: Callable[[int], int]) -> None:
        """Raises `ValueError` where the ranks of the model cannot share the tokens of a capacity.

        Args:
            rows: from tokens of a pack to those of a tensor-parallel rank, likewise.
        """
        for capacity in self.known:
            rows(capacity.tokens)
            self._check_context(capacity)

    def _check_context(self, capacity: Capacity) -> None:
        if self.cp_size > 1 and capacity.tokens % 2:
            raise ValueError(
                f"expected capacities of an even number of tokens, which {self.cp_size} context-parallel "
                f"ranks share, got {capacity.tokens}"
            )

    def observe(self, params: Any, tokens: int) -> None:
        """Remembers the shape of a pack of the warm-up, of `tokens` physical tokens."""
        shape = pack_shape(params, tokens, self._tail, cp_size=self.cp_size)
        if shape is not None:
            self._observed.add(shape)

    def learn(self, is_warm: bool, exchange: Exchange) -> bool:
        """Learns them from what was observed, the same on all ranks, once the warm-up of all is over.

        Ranks need not have counted the same packs: one may not have been able to read some, or has offsets
        that are longer.

        Args:
            is_warm: the warm-up of this rank is over.
            exchange: asks the ranks, in each step until they have learned.

        Returns:
            Whether they have.
        """
        somebody_waits, *needs = exchange([int(not is_warm), *needs_of(self._observed, self._extra_seqs)])
        if somebody_waits:
            self._waited += is_warm
            if is_warm and self._waited == _PATIENCE:
                log.warning(
                    "still waits to learn capacities, %d steps after its warm-up: another rank that runs the "
                    "same packs could not read enough of its own; set cuda_graph_max_packed_seqs and "
                    "max_seqlen_per_dp_cp_rank, or see that rank's report",
                    _PATIENCE,
                )
            return False
        self.known = capacities_for(Needs(*needs), self._extra_seqs, self.cp_size)
        counts = ",".join(str(capacity.num_seqs) for capacity in self.known)
        log.info(
            "learned from %d pack shapes; to fix them set cuda_graph_max_packed_seqs=%s and "
            "max_seqlen_per_dp_cp_rank=%d",
            len(self._observed),
            counts,
            self.known[0].tokens,
        )
        return True

    def report(self) -> list[dict[str, Any]]:
        """As plain values."""
        return [dataclasses.asdict(capacity) for capacity in self.known]
