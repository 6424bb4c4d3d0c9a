# SPDX-License-Identifier: Apache-2.0
"""Says what is due to be captured, from the kinds of micro-batches that steps have held.

Pure: a kind is any hashable value. Captures nothing, and knows no step but those it is told of.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Generic, TypeVar

__all__ = ["DueKinds"]

K = TypeVar("K", bound=Hashable)

_STEPS_IN_VAIN = 3


class DueKinds(Generic[K]):
    """Counts the steps in which each kind occurred, and remembers which kinds have their graphs.

    Args:
        steps_needed: in how many steps a kind has to occur before it is captured.

    Attributes:
        warmed_up: the kinds that have occurred often enough.
        due: those of them that have no graphs.
        captured: the kinds that have their graphs, or stay eager.
        under_other_settings: captured kinds that had to run under settings that they have no graphs for.
    """

    def __init__(self, steps_needed: Callable[[K], int]) -> None:
        self._steps_needed = steps_needed
        self._of_step: set[K] = set()
        self._passed_over: set[K] = set()
        self._steps: dict[K, int] = {}
        self._steps_passed_over: Counter[K] = Counter()
        self.captured: set[K] = set()
        self.warmed_up: set[K] = set()
        self.due: set[K] = set()
        self.under_other_settings: set[K] = set()

    def note(self, kind: K) -> None:
        """Remembers that the running step holds micro-batches of a kind."""
        self._of_step.add(kind)

    def note_other_settings(self, kind: K) -> None:
        """Remembers that a captured kind ran under settings that it has no graphs for."""
        self.under_other_settings.add(kind)

    def pass_over(self, kinds: Iterable[K]) -> None:
        """Remembers that some kinds could not be captured before the running step, though they are due."""
        self._passed_over.update(kinds)

    def end_step(self) -> set[K]:
        """Counts the step that was noted.

        Returns:
            The kinds that have now been passed over before three of the steps that held them.
        """
        in_vain = self._of_step & self._passed_over
        self._steps_passed_over.update(in_vain)
        for kind in self._of_step - self.warmed_up:
            self._steps[kind] = self._steps.get(kind, 0) + 1
            if self._steps[kind] >= self._steps_needed(kind):
                self.warmed_up.add(kind)
                self.due.add(kind)
        self._of_step.clear()
        self._passed_over.clear()
        if in_vain:
            in_vain = {kind for kind in in_vain if self._steps_passed_over[kind] == _STEPS_IN_VAIN}
        return in_vain

    def reopen(self, without_graphs: Iterable[K]) -> None:
        """Makes due again what ran under other settings and has no graphs for the present ones."""
        self.captured -= self.under_other_settings.intersection(without_graphs)
        self.due = self.warmed_up - self.captured

    def mark_captured(self, kinds: Collection[K]) -> None:
        """Takes kinds for captured."""
        self.captured.update(kinds)
        self.due.difference_update(kinds)
        self.under_other_settings.difference_update(kinds)

    def forget_graphs(self, of: Callable[[K], bool] = lambda kind: True) -> None:
        """Graphs are gone, of all kinds or of some: those that were warmed up are due again."""
        self.captured -= {kind for kind in self.captured if of(kind)}
        self.due |= {kind for kind in self.warmed_up if of(kind)}
