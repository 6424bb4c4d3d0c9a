# SPDX-License-Identifier: Apache-2.0
"""Figures of one block over all banks that it has had."""

from collections import Counter

from megagraph.bank.bank import Bank
from megagraph.bank.chain import Chain

__all__ = ["Totals"]


class Totals:
    """What former banks have counted, beside the present one."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._most_in_flight = 0

    def add(self, bank: Bank, chain: Chain) -> None:
        """A bank that is about to be released, and its chain."""
        self._counts.update(bank.counters())
        self._seconds += bank.capture_seconds
        self._most_in_flight = self.most_in_flight(chain)

    def counters(self, bank: Bank) -> dict[str, int]:
        """Calls, replays and eager calls by reason.

        Args:
            bank: the present one.
        """
        return {name: count + self._counts[name] for name, count in bank.counters().items()}

    def capture_seconds(self, bank: Bank) -> float:
        """Spent capturing."""
        return self._seconds + bank.capture_seconds

    def most_in_flight(self, chain: Chain) -> int:
        """The most micro-batches that held slots at once.

        Args:
            chain: of the present bank.
        """
        return max(self._most_in_flight, chain.core.most_in_flight)
