# SPDX-License-Identifier: Apache-2.0
"""Through which forward a micro-batch enters, where classes or instances override Megatron's own.

Keeps what is known of that, and says it; wraps nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megagraph.decide.reasons import EagerReason
from megagraph.log import log

__all__ = ["Entries", "Entry", "Level"]

_WARMING_UP = EagerReason.WARMING_UP


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """One of the forwards that a module's call may pass through, wrapped by the plugin.

    Args:
        where: its name, with module and class.
        overrides: Megatron's forward; its own name where it is that.
        missing: parameters of Megatron's forward that it lacks.
        held: gives what it was before; None once an instance that it was set on has another one.
    """

    where: str
    overrides: str
    missing: Sequence[str]
    held: Callable[[], Any]

    @property
    def function(self) -> Callable[..., Any]:
        """What it was before, called with the module first: for whoever wraps it and keeps it."""
        function: Callable[..., Any] | None = self.held()
        assert function is not None
        return function

    @property
    def is_megatrons(self) -> bool:
        """Whether it is Megatron's own forward."""
        return self.where == self.overrides


class Entry:
    """The forwards of one module, and the one that the plugin acts in.

    That is the innermost that calls reach: what lies around it sees rows and packs as they were given.
    Which one it is shows in the first call, and that runs as given.

    Args:
        levels: outermost first, Megatron's last; empty if no class of the module is Megatron's.

    Attributes:
        acting: where the plugin acts; None until it is known.
        reached: how many calls have reached a level where it acts, or where it should have acted.
    """

    def __init__(self, levels: Sequence[Level]) -> None:
        self._levels = tuple(levels)
        self.acting: Level | None = self._levels[0] if len(self._levels) == 1 else None
        self.reached = 0

    @property
    def is_known(self) -> bool:
        """Whether calls have shown where to act, or cannot show it."""
        return self.acting is not None or not self._levels

    @property
    def is_megatrons(self) -> bool:
        """Whether nothing that overrides Megatron's forward takes its place."""
        return self.acting is not None and self.acting.is_megatrons

    def takes(self, level: Level) -> bool:
        """Whether a call that has reached Megatron's own forward is acted on there."""
        if self.acting is None and level in self._levels:
            self.acting = level
        return self.acting is level

    def is_inside(self, level: Level) -> bool:
        """Whether a level is further in than the one that acts, or none of this module's."""
        if level not in self._levels:
            return True
        return self.acting is not None and self._levels.index(level) > self._levels.index(self.acting)

    @property
    def overriding(self) -> Callable[..., Any] | None:
        """What acts in place of Megatron's forward, or None; nor does what its host has taken away."""
        return None if self.acting is None or self.is_megatrons else self.acting.held()

    def problem(self) -> str | None:
        """Why nothing can be served through the level that acts, or None."""
        level = self.acting
        if level is None or not level.missing:
            return None
        names = ", ".join(level.missing)
        return f"{level.where} overrides {level.overrides} and has no parameter {names}"


class Entries:
    """How a model and its block of layers are entered.

    Args:
        model: the model's forwards.
        block: the forwards of its block of layers.
        block_class: of the block, for the log.

    Attributes:
        are_megatrons: nothing that overrides Megatron's forwards takes their place.
        are_settled: whether it is known where to act; until then micro-batches run as they were given.
    """

    def __init__(self, model: Entry, block: Entry, block_class: str = "") -> None:
        self.model = model
        self.block = block
        self.are_megatrons = self.are_settled = model.is_megatrons and block.is_megatrons
        self._block_class = block_class
        self._failure: str | None = None
        self._news: list[str] = []
        self._told: set[str] = set()

    @property
    def overriding(self) -> Callable[..., Any] | None:
        """What acts in place of Megatron's forward of the model, or None."""
        return self.model.overriding

    def fail(self, sentence: str) -> None:
        """Keeps the model eager from the next step boundary on, and micro-batches as given until then."""
        self._failure = sentence
        self.are_settled = False

    def tell(self, sentence: str) -> None:
        """Has something said at the next step boundary, once."""
        if sentence not in self._told:
            self._told.add(sentence)
            self._news.append(sentence)
            self.are_settled = False

    def model_bypassed(self, level: Level) -> EagerReason:
        """Takes note of a call of the model that ran as given, and got no further in than `level`.

        Returns:
            How it counts.
        """
        self.model.reached += 1
        if self.model.acting is None:
            self.model.acting = level
        acting = self.model.acting
        if acting is not level:
            self.tell(f"some calls of {level.where} do not reach {acting.where}, and run eager")
        return EagerReason.SCOPE_UNSUPPORTED if level.missing or acting is not level else _WARMING_UP

    def block_bypassed(self, level: Level, decided: EagerReason | None) -> EagerReason:
        """Takes note of a call of the block that got no further in than `level`.

        Args:
            level: where it is.
            decided: why the micro-batch runs as given; None if it was to run on the canonical pack.

        Returns:
            How it counts.
        """
        self.block.reached += 1
        if self.block.acting is None:
            self.block.acting = level
        return self.block_missed(decided)

    def block_missed(self, decided: EagerReason | None) -> EagerReason:
        """The same of a micro-batch that did not get to where the plugin acts in the block."""
        if decided is not None:
            return decided
        acting = self.block.acting
        where = self._block_class if acting is None else acting.where
        self.fail(f"some calls do not reach {where}, where the plugin acts")
        return EagerReason.SCOPE_UNSUPPORTED

    def settle(self) -> str | None:
        """At a step boundary: settles where the plugin acts, if it is known by now, and says so.

        Returns:
            Why the model has to stay eager, or None.
        """
        failure = self._failure or self.model.problem() or self.block.problem()
        is_known = self.model.is_known and self.block.is_known
        if failure is None and is_known and self.block.acting is None:
            failure = f"its layers are run by {self._block_class}, which is none of Megatron's blocks"
        if failure is None and is_known:
            self.are_megatrons = self.model.is_megatrons and self.block.is_megatrons
            for entry in (self.model, self.block):
                if entry.acting is not None and not entry.is_megatrons:
                    self.tell(f"{entry.acting.where} is entered in place of {entry.acting.overrides}")
        self.are_settled = is_known or failure is not None
        for sentence in self._news:
            log.info(sentence)
        self._news.clear()
        return failure
