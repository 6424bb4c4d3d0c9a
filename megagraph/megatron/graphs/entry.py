# SPDX-License-Identifier: Apache-2.0
"""Through which door a micro-batch enters a model, and its block of layers. Wraps nothing.

Note [Two doors]
One door is Megatron's own forward; the other is the call of the module, which runs whatever forward it has.
A forward of a subclass or an instance may reach Megatron's or not. Only a call shows which; it runs as given.
If Megatron's is reached, the plugin acts there, so that what lies around it sees rows and packs as they were
given; otherwise around the call, whose hooks then see what the forward sees.

A host may set another forward between two calls, so each call of a model looks for that first. Code that
calls such a forward itself, and not the module, passes no door, and runs as given.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from megagraph._C import MicroBatch
from megagraph.log import PATIENCE, log
from megagraph.megatron.seams import BLOCK_FORWARD, GPT_FORWARD, called_name, hybrid_seams, made_in
from megagraph.megatron.watch import weakly
from megagraph.reasons import EagerReason

__all__ = ["Doors", "Entries", "is_ours", "names_of"]


def is_ours(module: nn.Module) -> bool:
    """Whether a call of a module runs Megatron's forward, wrapped by the plugin, with nothing around it."""
    forward: Any = module.forward
    return made_in(getattr(forward, "__func__", forward)).startswith("megagraph.megatron.patch.")


def names_of(function: Callable[..., Any]) -> Sequence[str]:
    """The parameters that arguments by position go to; empty if some of them cannot be given by name."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL) for each in parameters):
        return ()
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


class Doors:
    """The two doors of a model, or of its block of layers, and at which of them the plugin acts."""

    def __init__(self, module: nn.Module) -> None:
        forward: Any = module.forward
        function = getattr(forward, "__func__", forward)
        self.forward = weakly(function)  # gives what a call of the module runs, as long as that exists
        self.names = names_of(forward)  # of its arguments by position
        self.called = called_name(function)
        self.is_plain = is_ours(module)  # a host's forward may run the layers of a block itself
        self.handed: Any = None  # to such a one, in place of the pack with the capacity's constants
        # Whether the plugin acts in Megatron's forward, or around the call; None until that is known.
        self.is_own = True if self.is_plain else None
        self.reached = 0  # calls that have come to where the plugin acts, or should have and are counted
        seams = (GPT_FORWARD, BLOCK_FORWARD, *(hybrid_seams() or ()))
        seam = next((seam for seam in seams if isinstance(module, seam.owner())), None)
        self.own = "" if seam is None else seam.path  # the name of Megatron's forward
        self.problem = ""  # why nothing can be served around the call; empty if something can
        if seam is None:  # its calls are not wrapped
            self.is_own = False
            self.problem = f"its layers are run by {self.called}, which is of none of Megatron's blocks"
        elif missing := seam.missing_in(forward):
            self.problem = f"{self.called} overrides {self.own} and has no parameter {missing}"


class Entries:
    """How a model and its block of layers are entered."""

    are_megatrons: bool  # the plugin acts in Megatron's forwards
    are_settled: bool  # it is known where to act; until then micro-batches run as they were given

    def __init__(self, model: Any) -> None:
        self.awaited = ""  # what keeps the model eager, unless a call shows frequencies of each token
        self._waited = 0  # steps
        self.find_doors(model)

    def find_doors(self, model: Any) -> None:
        """At first, and if the model or its block has another forward by now: `_C.has_forwards()`."""
        self.model, self.block = Doors(model), Doors(model.decoder)
        self.are_megatrons = self.are_settled = bool(self.model.is_own and self.block.is_own)
        self._failure = ""
        self.news: list[str] = []  # what `settle()` says
        self._told: set[str] = set()

    def fail(self, sentence: str) -> None:
        """Keeps the model eager from the next step boundary on, and micro-batches as given until then."""
        self._failure = self._failure or sentence
        self.are_settled = False

    @property
    def failure(self) -> str:
        """Why the model has to stay eager, as calls of these forwards have shown; empty for nothing."""
        problems = (each.problem for each in (self.model, self.block) if each.is_own is False)
        return next(filter(None, (self._failure, *problems)), "")

    def _tell(self, sentence: str) -> None:
        """Has something said before the next step, once."""
        if sentence not in self._told:
            self._told.add(sentence)
            self.news.append(sentence)

    def model_bypassed(self) -> EagerReason:
        """Takes note of a call of the model that ran as given. Returns how it counts."""
        doors = self.model
        if doors.is_own:
            self._tell(f"some calls of {doors.called} do not reach {doors.own}, and run eager")
        is_new, doors.is_own = doors.is_own is None, bool(doors.is_own)
        return EagerReason.WARMING_UP if is_new and not doors.problem else EagerReason.SCOPE_UNSUPPORTED

    def block_missed(self, batch: MicroBatch | EagerReason) -> EagerReason:
        """Takes note of a micro-batch that did not get to where the plugin acts in the block.

        Returns how it counts: why it was to run as given, if it was not to run on the canonical pack.
        """
        if isinstance(batch, EagerReason):
            return batch
        missed = self.block.own if self.block.is_own else self.block.called
        self.fail(f"some calls do not reach {missed}, where the plugin acts")
        return EagerReason.SCOPE_UNSUPPORTED

    def settle(self) -> None:
        """Before a step: settles where the plugin acts, if it is known by now, and says so."""
        doors, failure = (self.model, self.block), self.failure
        is_known = all(each.is_own is not None for each in doors)
        if is_known and not failure:
            self.are_megatrons = all(each.is_own for each in doors)
            for each in doors:
                if not each.is_own:
                    self._tell(f"{each.called} is entered in place of {each.own}")
        self.are_settled = bool(failure) or (is_known and not self.awaited)
        if is_known and self.awaited:
            self._waited += 1
            if self._waited == PATIENCE:
                log.warning(
                    "runs eager until a pack of several documents shows whether rotary frequencies have a "
                    "row for each token; if they have none: %s",
                    self.awaited,
                )
        for sentence in self.news:
            log.info(sentence)
        self.news.clear()
