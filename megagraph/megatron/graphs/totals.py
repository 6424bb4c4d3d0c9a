# SPDX-License-Identifier: Apache-2.0
"""Figures of one block over all banks that it has had."""

from collections import Counter

from megagraph.bank.bank import Bank
from megagraph.timeline import Lease

__all__ = ["Totals"]

_MOST_LEASES = 256


class Totals:
    """What former banks have counted, beside the present one."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._most_in_flight = 0
        self._leases: list[Lease] = []

    def add(self, bank: Bank) -> None:
        """A bank that is about to be released."""
        self._counts.update(bank.counters())
        self._seconds += bank.capture_seconds
        self._most_in_flight = self.most_in_flight(bank)
        self._leases = self.last_leases(bank)

    def counters(self, bank: Bank) -> dict[str, int]:
        """Calls, replays and eager calls by reason.

        Args:
            bank: the present one.
        """
        return {name: count + self._counts[name] for name, count in bank.counters().items()}

    def capture_seconds(self, bank: Bank) -> float:
        """Spent capturing."""
        return self._seconds + bank.capture_seconds

    def most_in_flight(self, bank: Bank) -> int:
        """The most micro-batches that held slots at once.

        Args:
            bank: the present one.
        """
        return max(self._most_in_flight, bank.core.most_in_flight)

    def last_leases(self, bank: Bank) -> list[Lease]:
        """When slots were last leased; none where there is only one.

        Args:
            bank: the present one.
        """
        present = [
            Lease(slot=slot, grad=grad, begin=begin / 1e6, end=end / 1e6 if end else None)
            for slot, grad, begin, end in bank.core.last_leases()
        ]
        return [*self._leases, *present][-_MOST_LEASES:]
