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
    """Counts the steps in which kinds occurred, and remembers which of them have their graphs.

    Kinds of one family differ in the state of the model alone: steps of all of them warm the family up, and
    each one of them is due once it has occurred.

    Args:
        family_of: the family of a kind.
        steps_needed: in how many steps a family has to occur before a kind of it is captured.

    Attributes:
        warmed_up: the kinds that have occurred, of families that have occurred often enough.
        due: those of them that have no graphs.
        captured: the kinds that have their graphs, or stay eager.
    """

    def __init__(self, family_of: Callable[[K], Hashable], steps_needed: Callable[[K], int]) -> None:
        self._family_of = family_of
        self._steps_needed = steps_needed
        self._of_step: set[K] = set()
        self._passed_over: set[K] = set()
        self._steps: Counter[Hashable] = Counter()  # of each family
        self._cold: set[K] = set()
        self._recurring: set[Hashable] = set()  # families of which a kind has occurred in two steps
        self._steps_passed_over: Counter[K] = Counter()
        self.captured: set[K] = set()
        self.warmed_up: set[K] = set()
        self.due: set[K] = set()

    def note(self, kind: K) -> None:
        """Remembers that the running step holds micro-batches of a kind."""
        self._of_step.add(kind)

    def pass_over(self, kinds: Iterable[K]) -> None:
        """Remembers that some kinds could not be captured before the running step, though they are due."""
        self._passed_over.update(kinds)

    def end_step(self) -> set[K]:
        """Counts the step that was noted.

        Returns:
            The kinds that have now been passed over before three of the steps that held them.
        """
        known = self._of_step & (self.warmed_up | self._cold) if self._of_step else set()
        self._recurring.update(map(self._family_of, known))
        new = self._of_step - self.warmed_up
        if new:
            self._warm_up(new)
        in_vain = self._of_step & self._passed_over
        self._steps_passed_over.update(in_vain)
        self._of_step.clear()
        self._passed_over.clear()
        if in_vain:
            in_vain = {kind for kind in in_vain if self._steps_passed_over[kind] == _STEPS_IN_VAIN}
        return in_vain

    def _warm_up(self, new: set[K]) -> None:
        self._cold |= new
        for family, kind in {self._family_of(kind): kind for kind in new}.items():
            self._steps[family] += 1
            if self._steps[family] >= self._steps_needed(kind):
                warm = {kind for kind in self._cold if self._family_of(kind) == family}
                self._cold -= warm
                self.warmed_up |= warm
                self.due |= warm - self.captured  # other ranks may have met some before

    def never_recurs(self, kind: K) -> bool:
        """Whether a family has warmed up although none of its kinds has occurred in two steps."""
        family = self._family_of(kind)
        return self._steps[family] > 1 and family not in self._recurring

    def captured_of_family(self, kind: K) -> Collection[K]:
        """The captured kinds of a kind's family."""
        family = self._family_of(kind)
        return [other for other in self.captured if self._family_of(other) == family]

    def mark_captured(self, kinds: Collection[K]) -> None:
        """Takes kinds for captured."""
        self.captured.update(kinds)
        self.due.difference_update(kinds)

    def forget_graphs(self, of: Callable[[K], bool] = lambda kind: True) -> None:
        """Graphs are gone, of all kinds or of some: those that were warmed up are due again."""
        self.captured -= {kind for kind in self.captured if of(kind)}
        self.due |= {kind for kind in self.warmed_up if of(kind)}

    def forget(self, of: Callable[[K], bool]) -> None:
        """Some kinds are as if they had never occurred."""
        for kinds in (self.captured, self.due, self.warmed_up, self._cold):
            kinds.difference_update([kind for kind in kinds if of(kind)])
