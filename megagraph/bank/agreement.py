# SPDX-License-Identifier: Apache-2.0
"""How ranks that share communicators stay together: what one of them cannot do, none does.

Knows no process group: whoever makes a bank hands over the exchange.
"""

import enum
from collections.abc import Callable, Sequence

__all__ = ["Exchange", "GroupGaveUp", "Verdict", "alone"]

# From this rank's values to the largest of each over the group. Every rank calls it equally often.
Exchange = Callable[[Sequence[int]], list[int]]


def alone(values: Sequence[int]) -> list[int]:
    """The exchange of a rank that shares no communicator."""
    return list(values)


class Verdict(enum.IntEnum):
    """How one part of a capture went; the worst one counts for the group."""

    FINE = 0
    FAILED = 1
    GAVE_UP = 2


class GroupGaveUp(RuntimeError):
    """Another rank of the group has given the whole capture up."""

    def __init__(self) -> None:
        super().__init__("another rank of the group gave this capture up")
