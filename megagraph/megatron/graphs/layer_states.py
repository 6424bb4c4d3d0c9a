# SPDX-License-Identifier: Apache-2.0
"""The states that one model's layers are met in: says what changed, and bounds those with graphs.

csrc/decide/states.h numbers them. Captures and drops nothing.

Graphs of several states, and of several numeric settings, lie beside each other in one bank; those of states
that were not used for the longest time are dropped.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from megagraph import _C
from megagraph.log import log
from megagraph.megatron.graphs.block_bank import BlockBank
from megagraph.megatron.parallel.peers import Peers

__all__ = ["LayerStates"]

_MOST_NAMED = 3
_MOST_DROPPED = 2


class LayerStates:
    """The states of one model's layers.

    Args:
        block: whose layers they are.
        numbers: of the states.
        peers: the ranks that are in a state together.
        most: how many may have graphs at once.

    Attributes:
        current: the number of the state at the last boundary.
        are_many: some should be forgotten.
    """

    def __init__(self, block: BlockBank, numbers: _C.States, peers: Peers, most: int) -> None:
        self._block = block
        self._peers = peers
        self._is_alone = peers.size == 1
        self._most = most
        self._numbers = numbers
        self._items: dict[str, tuple[int, str]] = {}  # of the last state that was new
        self._changes: dict[int, str] = {}  # what made each state another one than that before
        self._new_in_a_row = 0
        self._has_warned = False
        self._unguarded: list[str] = []
        self._times_dropped: Counter[int] = Counter()  # of each state: its graphs, for those of another one
        self._has_said_full = False
        self._met = 0, 0  # fingerprint and settings at the last boundary
        self.current = 0
        self.are_many = False

    # -- between steps ---------------------------------------------------------------------------

    def local_state(self, *, has_changed: bool) -> Sequence[int]:
        """What this rank tells the others of its group of its state.

        Args:
            has_changed: something that graphs rely on has, so that there may be other modules.

        Returns:
            Values for `agree()`; none if nobody has to be told, and the state is that of the last boundary.
        """
        watch = self._block.watch
        if has_changed:
            watch.follow_modules()
        met = watch.whole_state(), _C.numeric_settings(self._block.device)
        if met == self._met and self._is_alone:
            self._new_in_a_row = 0
            return ()
        self._met = met
        return self._numbers.local_state(self._peers.rank(), *met)

    def agree(self, largest: Sequence[int]) -> None:
        """Learns the group's state.

        Args:
            largest: of each value that a rank has said.

        Raises:
            RuntimeError: where the ranks' last calls were in different states, naming what differs. Not while
                nothing has been captured: no rank can have replayed.
        """
        bank = self._block.bank
        if not self._numbers.agree(largest) and bank.variants:
            self._raise_for_ranks()
        self.current = self._numbers.current
        self._new_in_a_row = self._new_in_a_row + 1 if self._numbers.is_new else 0
        if self._numbers.is_new:
            self._name_what_changed()
            self.are_many = self._numbers.has_many()

    def forget_oldest(self, keep: set[int]) -> set[int]:
        """Forgets states, where there are many; returns the numbers that nobody will be told of again.

        Args:
            keep: those that have graphs.
        """
        gone = self._numbers.forget_oldest(keep)
        for number in gone:
            self._changes.pop(number, None)
            del self._times_dropped[number]
        self.are_many = False
        return gone

    def _raise_for_ranks(self) -> None:
        of_ranks = self._peers.gather(self._since_last_new() or "nothing")
        said = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(of_ranks))
        raise RuntimeError(
            "inside a step the layers' state changed on some of the ranks that run the same packs and not on "
            "others: expected every rank to run the same program. Changed since the graphs were captured: "
            + said
        )

    def _items_of_now(self) -> dict[str, tuple[int, str]]:
        items: dict[str, tuple[int, str]] = {}
        watch = self._block.watch
        for name, value, words in watch.state_items():
            items.setdefault(name, (value, words))
        return items

    def _since_last_new(self) -> str:
        return _differences(self._items, self._items_of_now())

    def _name_what_changed(self) -> None:
        if self._has_warned and self._new_in_a_row > self._most:  # a walk over everything, in each step
            return
        now = self._items_of_now()
        changed = _differences(self._items, now) or "the numeric settings"
        if self._items:
            self._changes[self.current] = changed
            log.info("layers are in a state that is new: %s", changed)
        self._items = now
        if self._new_in_a_row > self._most and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the state of the layers was another one before each of the last %d steps, so that they run "
                "eager (STATE_CHANGED). It is new again: %s",
                self._most,
                changed,
            )

    # -- graphs ----------------------------------------------------------------------------------

    def follow_eager_layers(self) -> None:
        """After the first capture of a bank: layers that have no graphs are no part of the state any more."""
        watch, bank = self._block.watch, self._block.bank
        if watch.leave_out(bank.eager_sites):
            self._numbers.add_name(watch.whole_state())
            self._items = self._items_of_now()
        self._unguarded = sorted(watch.names_left_out())
        if self._unguarded:
            log.info("no part of the layers' state: %s", ", ".join(self._unguarded))

    def to_drop(self, captured: Collection[int]) -> list[int]:
        """Which states' graphs go for those of one more: the ones that were not used for the longest time.

        Args:
            captured: the numbers of those that have graphs.
        """
        number = len(set(captured) - {self.current}) + 1 - self._most
        oldest = [state for state in self._numbers.oldest_first() if state in captured]
        dropped = [state for state in oldest if state != self.current][: max(number, 0)]
        self._times_dropped.update(dropped)
        return dropped

    def has_place(self, captured: Collection[int]) -> bool:
        """Whether graphs may be captured in the state of now, be it in the place of others.

        States that alternate and are more than may have graphs would drive out each other's for ever. So
        one whose graphs have gone twice gets others when there is room, and is eager until then.

        Args:
            captured: the numbers of the states that have graphs.
        """
        is_full = self.current not in captured and len(captured) >= self._most
        if not is_full or self._times_dropped[self.current] < _MOST_DROPPED:
            return True
        if not self._has_said_full:
            self._has_said_full = True
            log.warning(
                "the layers alternate between more states than may have graphs at once, and some stay eager "
                "(STATE_CHANGED); cuda_graph_max_states is %d",
                self._most,
            )
        return False

    # -- figures ---------------------------------------------------------------------------------

    def describe(self, captured: Collection[int]) -> str:
        """How many states have graphs, and what is no part of a state, for the log."""
        left_out = f", {_count(len(self._unguarded), 'name')} left out" if self._unguarded else ""
        return f"{_count(len(captured), 'state')} captured{left_out}"

    def report(self, captured: Iterable[int]) -> dict[str, Any]:
        """Which states have graphs, what made them others, and what is no part of a state, by name."""
        return {
            "states": [self._changes.get(number, "the first one") for number in sorted(set(captured))],
            "unguarded": self._unguarded,
        }


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _differences(before: dict[str, tuple[int, str]], now: dict[str, tuple[int, str]]) -> str:
    """The first values that differ, in words."""
    nothing = 0, "nothing"
    pairs = {name: (before.get(name, nothing), now.get(name, nothing)) for name in {**before, **now}}
    said = [f"{name} {one[1]} -> {other[1]}" for name, (one, other) in pairs.items() if one[0] != other[0]]
    more = len(said) - _MOST_NAMED
    return ", ".join(said[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
