# SPDX-License-Identifier: Apache-2.0
"""Numbers the states that a model's layers are met in, alike on all ranks that share its communicators.

csrc/watch/state_watch.h, Note [State] says what a state is; numeric settings belong to it too.
"""

import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from megagraph.decide.reasons import EagerReason

__all__ = ["States"]

_NOBODY = -1
_MOST_REMEMBERED = 64


class States:
    """The states so far.

    A state is met between steps, where all ranks say which one each of them is in: a state of the group is
    what all of them are in. Inside a step it is the one in which this rank was like that before.

    Args:
        rank: asked between steps for this one's place in its group.
        size: of the group.
        run_alike: its ranks run the same packs, and so calls in the same states.

    Attributes:
        current: the number of the state at the last boundary.
        is_new: whether it was met there for the first time.
    """

    def __init__(self, rank: Callable[[], int], size: int, *, run_alike: bool = True) -> None:
        self._rank_of_now = rank
        self._rank = 0
        self._size = size
        self._compares_calls = size > 1 and run_alike
        self._own: dict[tuple[int, int], int] = {}  # of this rank: fingerprint and settings, to a number
        self._num_own = 0
        self._of_group: OrderedDict[tuple[int, ...], int] = OrderedDict()  # the one used last comes last
        self._num = 0
        self._settings = self._fingerprint = 0
        self._last: tuple[int, int] | None = None  # fingerprint and number of the call before
        self._calls = 0  # a checksum of the states of a step's calls
        self.current = 0
        self.is_new = False

    # -- between steps ---------------------------------------------------------------------------

    def local_state(self, fingerprint: int, settings: int) -> list[int]:
        """What this rank tells the others: the state that it is in, and those that its calls were in.

        Args:
            fingerprint: of its modules.
            settings: the numeric ones.
        """
        self._settings, self._fingerprint, self._rank = settings, fingerprint, self._rank_of_now()
        own = self._number_of_own(fingerprint, settings)
        places = [0] * self._size
        places[self._rank] = own + 1
        return [self._calls, -self._calls, *places]

    def agree(self, largest: Sequence[int]) -> bool:
        """Learns the state of the group from the largest of what each rank has said.

        Returns:
            False where the ranks' calls since the last boundary were in different states.
        """
        most, least, *places = largest
        group = tuple(place - 1 for place in places)
        self.is_new = group not in self._of_group
        if self.is_new:
            self._of_group[group] = self._num
            self._num += 1
        self._of_group.move_to_end(group)
        self.current = self._of_group[group]
        self._calls = 0
        self._last = self._fingerprint, self.current
        return most == -least

    def has_many(self) -> bool:
        """Whether there are more states than are remembered for long."""
        return len(self._of_group) > _MOST_REMEMBERED

    def forget_oldest(self, keep: Collection[int]) -> set[int]:
        """Forgets the states that were not used for the longest time, while there are too many of them.

        Args:
            keep: numbers that have to be found again.

        Returns:
            The numbers that nobody will be told of again.
        """
        kept = {*keep, self.current}
        others = [group for group, number in self._of_group.items() if number not in kept]
        oldest = others[: max(len(self._of_group) - _MOST_REMEMBERED, 0)]
        gone = {self._of_group.pop(group) for group in oldest}
        known = {group[self._rank] for group in self._of_group}
        self._own = {state: own for state, own in self._own.items() if own in known}
        return gone

    # -- inside of a step ------------------------------------------------------------------------

    def of_call(self, fingerprint: int) -> int:
        """The number of the state that a call is in; a negative one has no graphs.

        Args:
            fingerprint: of its modules.
        """
        if self._last is None or self._last[0] != fingerprint:
            self._last = fingerprint, self._find(fingerprint, self._settings)
        number = self._last[1]
        if self._compares_calls:
            self._calls = zlib.crc32(number.to_bytes(8, "little", signed=True), self._calls)
        return number

    def under(self, settings: int) -> int:
        """The number of the last call's state under other numeric settings; a negative one has no graphs."""
        return _NOBODY if self._last is None else self._find(self._last[0], settings)

    def _find(self, fingerprint: int, settings: int) -> int:
        own = self._own.get((fingerprint, settings))
        if own is None and self._size > 1:
            return _NOBODY  # nobody knows what the others call it
        if own is None:
            own = self._number_of_own(fingerprint, settings)
            self._of_group[(own,)] = self._num
            self._num += 1
        for group in reversed(self._of_group):
            if group[self._rank] == own:
                if self._compares_calls or self._size == 1:  # ranks of other packs call in another order
                    self._of_group.move_to_end(group)
                return self._of_group[group]
        return _NOBODY

    def _number_of_own(self, fingerprint: int, settings: int) -> int:
        state = fingerprint, settings
        if state not in self._own:
            self._own[state] = self._num_own
            self._num_own += 1
        return self._own[state]

    # -- what is known of them -------------------------------------------------------------------

    def oldest_first(self) -> list[int]:
        """The numbers, the one that was not used for the longest time first."""
        return list(self._of_group.values())

    def difference(self, number: int, other: int) -> EagerReason:
        """Why graphs of one state do not serve another: this rank's modules, its settings, or other ranks."""
        if self._own_numbers(number) == self._own_numbers(other):
            return EagerReason.GROUP_DISAGREED
        if self._fingerprints(number) & self._fingerprints(other):
            return EagerReason.NUMERICS_CHANGED
        return EagerReason.STATE_CHANGED

    def _own_numbers(self, number: int) -> set[int]:
        return {group[self._rank] for group, known in self._of_group.items() if known == number}

    def _fingerprints(self, number: int) -> set[int]:
        own = self._own_numbers(number)
        return {fingerprint for (fingerprint, _settings), known in self._own.items() if known in own}

    def add_name(self, fingerprint: int) -> None:
        """The present state has another fingerprint from now on, since other modules count."""
        group = next(group for group, number in self._of_group.items() if number == self.current)
        self._own[fingerprint, self._settings] = group[self._rank]
        self._fingerprint = fingerprint
        self._last = fingerprint, self.current
