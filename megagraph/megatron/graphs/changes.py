# SPDX-License-Identifier: Apache-2.0
"""What has changed before a step: drops the graphs that relied on it, and says what runs eager for it.

Says what may be captured then, too; captures nothing. The ranks that share a model's communicators agree on
all of it.

Moved parameters and buffers, replaced generators and other modules release the whole bank, and another one
begins, whose counters go on. If main gradients alone have moved, only the variants that read them are
dropped, and their memory in the pools goes to the next capture. A model that is suspended keeps its graphs.

csrc/decide/states.h numbers the states that the layers are met in. Graphs of several states, and of several
numeric settings, lie beside each other in one bank; those of states that were not used for the longest time
are dropped.

Where packs are of several context-parallel sizes, each rank has met other sizes, and communicators in graphs
want all ranks to capture the same. So what one has met in one size, all capture in every size.
"""

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megagraph import _C
from megagraph._C import VariantKey
from megagraph.log import PATIENCE, log
from megagraph.megatron.graphs.captures import Captures
from megagraph.megatron.graphs.dispatcher import Dispatcher
from megagraph.megatron.parallel.peers import Peers
from megagraph.megatron.scopes.moe import forget_calls
from megagraph.reasons import EagerReason

__all__ = ["Changes"]

_DISAGREED, _MOVED = EagerReason.GROUP_DISAGREED, EagerReason.ADDRESS_MOVED
_MOST_NAMED = 3  # values that have changed
# A rank can capture, also what records gradients, and nothing is due.
_IDLE: tuple[bool, bool, set[VariantKey]] = (True, True, set())


class Changes:
    """What keeps the running step eager, here or on another rank of the group."""

    def __init__(self, captures: Captures, peers: Peers, dispatcher: Dispatcher, most_states: int) -> None:
        self._captures, self._peers, self._dispatcher = captures, peers, dispatcher
        self._due, self._states = dispatcher.due, dispatcher.states
        self._most = most_states  # that may have graphs at once
        self._has_moved = False  # without an announcement: what moves once moves again
        # Why every micro-batch of the step runs eager; why those do whose graphs add to main gradients.
        self.reason: EagerReason | None = None
        self.gradients_reason: EagerReason | None = None
        self.has_resumed = False  # the host has announced that what moved up to now has moved
        self.is_suspended = False  # it has announced that something may move: nothing is to be replayed
        self.has_raised = False  # the last step has, and may have left tensors of its micro-batches behind
        self._waited = 0  # steps in a row that another rank could not capture in
        # -- states --
        self._items: dict[str, tuple[int, str]] = {}  # of the last state that was new
        self._made_new: dict[int, str] = {}  # what made each state another one than that before
        self._accepted: set[int] = set()  # those in which nothing has to be refused
        self._new_in_a_row = 0
        self._has_warned = False
        self._unguarded: list[str] = []
        peers.what_changed = weakref.WeakMethod(self._what_changed)

    def set_suspended(self, is_suspended: bool) -> None:
        """Nothing replays as long as it is, nor until a boundary has looked at what moved meanwhile."""
        self.has_resumed = self.has_resumed or (self.is_suspended and not is_suspended)
        self.is_suspended = is_suspended
        if is_suspended:
            self._dispatcher.set_suspended(True)

    # -- what has changed ------------------------------------------------------------------------

    def look(self, *, runs_eager: bool, captures: bool) -> bool:
        """Before a step, which `runs_eager` or `captures` what is due: drops what must not be replayed.

        Returns whether it is not known of the state of now that nothing has to be refused in it.
        """
        if self.has_raised:
            self._clean_up()
        of_model = self._captures
        plan = of_model.plan
        # As in nearly every step and bare call. Only where Megatron calls them may layers stay joined.
        if (
            not runs_eager
            and of_model.arguments.entries.are_megatrons
            and not of_model.bank.has_other_streams()
            and of_model.watch.has_keys_of_now()
            and not (plan.refused and plan.may_graph_more())
            and self._dispatcher.is_unchanged()
        ):
            self._new_in_a_row = 0
            self.reason = self.gradients_reason = None
        else:
            self._look_closer(runs_eager=runs_eager, captures=captures)
        if runs_eager:  # all of the step, if what keeps it so ends inside: nobody has looked
            self.reason = self.reason or EagerReason.DISABLED
        else:
            self._dispatcher.set_suspended(False)
        self._dispatcher.keep_eager(self.reason, self.gradients_reason)
        return self._states.current not in self._accepted

    def _look_closer(self, *, runs_eager: bool, captures: bool) -> None:
        """Learns what keeps other ranks' steps eager as well, and drops the same graphs as they."""
        bank, watch = self._captures.bank, self._captures.watch  # a change may begin others
        had_graphs = bool(bank.variants)  # which another layer makes this rank alone drop
        changed = None if runs_eager else self._captures.what_changed()
        if self._dispatcher.has_new_arguments and changed is None and not runs_eager:
            changed = EagerReason.SIGNATURE_CHANGED
        is_away = not runs_eager and watch.are_gradients_away
        said = self._local_state(has_changed=changed is not None, had_graphs=had_graphs)
        stops = changed if changed is not None and self._costs_step(changed, captures) else None
        is_partial = changed is None or self._captures.have_only_gradients_moved
        self.reason = None if is_partial else stops
        self.gradients_reason = _MOVED if is_away else stops
        if self._peers.size > 1:  # a rank alone finds it in each micro-batch, and so need not ask
            bank, watch = self._captures.bank, self._captures.watch
            of_all, of_gradients = (
                bank.reason_before_step(training=training, look_at_grads=watch.have_other_grads)
                for training in (False, True)
            )
            self.reason, self.gradients_reason = self.reason or of_all, self.gradients_reason or of_gradients
        is_eager = runs_eager or self.reason is not None
        context = self._peers.context
        flags = changed is not None, is_eager, self.gradients_reason is not None, not context.is_whole
        has_changed, is_eager_anywhere, is_without_anywhere, is_broken, *heard = self._peers.max_over_ranks(
            [*map(int, flags), *said]
        )
        self._agree_on_state(heard)
        # Of a rank that begins eager too: it might replay as soon as a skip, or a suspension, is over.
        if is_eager_anywhere and self.reason is None and self._peers.size > 1:
            self.reason = _DISAGREED
        if is_without_anywhere and self.gradients_reason is None:
            self.gradients_reason = _DISAGREED
        if has_changed:
            self._drop(is_partial)
        if is_broken and context.is_whole:
            # Those ranks have dropped theirs: a pack that they share with this one is in no graph there.
            context.is_whole = False
            self._captures.reset()
            log.warning("other ranks have destroyed a group of theirs alone: nothing is captured any more")

    def _clean_up(self) -> None:
        """After a step that raised: frees what is left of it, where the error and its frames are garbage."""
        self.has_raised = False
        bank = self._captures.bank
        if bank.holders():
            model = self._captures.model
            forget_calls(model.decoder.layers)
            gc.collect()
        if holders := bank.holders():
            log.warning("a step that raised has left tensors that somebody holds: %s", holders)

    def _costs_step(self, changed: EagerReason, captures: bool) -> bool:
        """Whether a change costs an eager step: moves do not that were announced, or that are the rule."""
        if changed is not _MOVED or self.has_resumed:
            return changed is not _MOVED or not captures
        is_first, self._has_moved = not self._has_moved, True
        return is_first or not captures

    def _drop(self, is_partial: bool) -> None:
        """Drops the same graphs on all ranks: all of them where one rank cannot keep some."""
        bank, watch = self._captures.bank, self._captures.watch
        (everything,) = self._peers.max_over_ranks([int(not is_partial or bool(bank.holders()))])
        if everything:
            self._captures.reset()
        else:
            self._captures.drop([key for key in bank.variants if key.grad])
            watch.forget_gradients()
            self._due.forget_graphs(only_training=True)

    # -- what is captured ------------------------------------------------------------------------

    def due_anywhere(self, can_capture: bool) -> set[VariantKey]:
        """What all ranks capture now, in the state of now. `can_capture`: shapes are known on this rank."""
        bank, watch = self._captures.bank, self._captures.watch
        has_memory, has_gradients = watch.has_memory(grad=False), watch.has_memory(grad=True)
        # Graphs that are captured now would find others at their first call, where ranks cannot ask any more.
        are_alone = self._peers.size == 1 or not watch.have_other_grads
        has_gradients = has_gradients and self.gradients_reason is None and are_alone
        due: set[VariantKey] = set()
        # What is due in a state that is another one each time is for nobody.
        # But a first capture finds out which layers' own calls make it so.
        settles = self._new_in_a_row <= self._most or not self._due.is_warm
        if can_capture and settles and self._due.due and self._ask_for_place():
            kinds = self._due.due_in(self._states.current, torch.is_grad_enabled())
            due = {kind for kind in kinds if (has_gradients if kind.grad else has_memory)}
        if due and not self._captures.is_idle():
            due.clear()
        if self._peers.run_other_packs:
            # What others have met is captured here as well, so whatever keeps a capture back does so first.
            can_capture = can_capture and has_memory and not bank.holders()
            return self._due_on_all(due, can_capture=can_capture, has_gradients=has_gradients)
        wanted = [each or set() for each in self._peers.gather(due or None)]
        of_all: set[VariantKey] = set.intersection(*wanted)
        self._waited = self._waited + 1 if any(wanted) and not of_all else 0
        if self._waited == PATIENCE:
            log.warning("a capture has waited for %d steps: ranks want different graphs, or none", PATIENCE)
        return of_all

    def _due_on_all(
        self, due: Iterable[VariantKey], *, can_capture: bool, has_gradients: bool
    ) -> set[VariantKey]:
        """Kinds that all ranks capture now, in every size; of which each asks equally often."""
        context = self._peers.context
        can_capture = can_capture and context.is_whole
        here = can_capture, has_gradients, {*due} if can_capture else set()
        said = [each or _IDLE for each in self._peers.gather(None if here == _IDLE else here)]
        waiting = [str(rank) for rank, (can, _has_gradients, _kinds) in enumerate(said) if not can]
        wanted = {kind for _can, _has_gradients, kinds in said for kind in kinds}
        self._waited = self._waited + 1 if waiting and wanted and can_capture else 0
        if self._waited == PATIENCE:
            log.warning(
                "a capture has waited for %d steps: rank %s of those that may share packs cannot capture. "
                "It has run no pack yet, or something holds its graphs, or its memory or a group is away",
                PATIENCE,
                ", ".join(waiting),
            )
        if waiting:
            return set()
        have_gradients = all(has for _can, has, _kinds in said)
        wanted = {kind for kind in wanted if have_gradients or not kind.grad}
        return {kind.replace(cp_size=size) for kind in wanted for size in context.sizes}

    # -- states ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Meets a state in which nothing has to be refused, with all ranks of the group."""
        self._agree_on_state(self._peers.max_over_ranks(self._local_state()))
        self.accept_state()

    def accept_state(self) -> None:
        """Takes note that in the state of now nothing has to be refused."""
        self._accepted.add(self._states.current)

    def _local_state(self, *, has_changed: bool = False, had_graphs: bool = False) -> Sequence[int]:
        """What this rank tells the others of its state, for `_agree_on_state()`."""
        watch = self._captures.watch
        if has_changed:  # there may be other modules
            watch.follow_modules()
        settings = _C.numeric_settings(self._captures.device)
        return [int(had_graphs), *self._states.local_state(self._peers.rank(), watch.whole_state(), settings)]

    def _agree_on_state(self, largest: Sequence[int]) -> None:
        """Learns the group's state from the largest of each value that a rank has said.

        Raises `RuntimeError` if the ranks' last calls were in different states, naming what differs. Not
        while nothing has been captured: no rank can have replayed.
        """
        states, (had_graphs, *of_calls) = self._states, largest
        if not states.agree(of_calls) and had_graphs:
            of_ranks = self._peers.gather(self._what_changed() or "nothing")
            said = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(of_ranks))
            raise RuntimeError(
                "inside a step the layers' state changed on some of the ranks that run the same packs and "
                "not on others: expected every rank to run the same program. Changed since the graphs were "
                f"captured: {said}"
            )
        self._new_in_a_row = self._new_in_a_row + 1 if states.is_new else 0
        if states.is_new:
            self._name_what_changed()
        if states.has_many():  # those with graphs stay, and are found again
            gone = states.forget_oldest(self._due.states_with_graphs())
            self._due.forget_states(gone)
            self._accepted -= gone
            self._made_new = {it: what for it, what in self._made_new.items() if it not in gone}

    def _what_changed(self) -> str:
        watch = self._captures.watch
        return _differences(self._items, watch.state_items())

    def _name_what_changed(self) -> None:
        if self._has_warned and self._new_in_a_row > self._most:  # a walk over everything, in each step
            return
        watch = self._captures.watch
        now = watch.state_items()
        others = " or another rank's state" if self._peers.size > 1 else ""
        changed = _differences(self._items, now) or f"the numeric settings{others}"
        if self._items:
            self._made_new[self._states.current] = changed
            log.info("layers are in a state that is new: %s", changed)
        self._items = now
        if self._new_in_a_row > self._most and self._due.is_warm and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the state of the layers was another one before each of the last %d steps, so that they run "
                "eager (STATE_CHANGED). It is new again: %s",
                self._most,
                changed,
            )

    def follow_capture(self, is_first: bool) -> None:
        """After a capture, by which values may have settled: they are another name of the state of now.

        After a bank's first one, layers without graphs are no part of it, and joined ones have one name.
        """
        watch, bank = self._captures.watch, self._captures.bank
        are_fewer = is_first and watch.leave_out(bank.eager_sites)
        if is_first:
            self._unguarded = sorted(watch.names_left_out())
            if self._unguarded:
                log.info("no part of the layers' state: %s", ", ".join(self._unguarded))
        now = watch.whole_state()
        if are_fewer:
            self._states.rename(now)
        elif not self._states.is_met(now, _C.numeric_settings(self._captures.device)):
            self._states.add_name(now)
        elif not is_first:
            return
        self._items = watch.state_items()

    def make_room(self) -> None:
        """Before a capture: drops graphs of states that were not used for the longest time, if need be."""
        bank = self._captures.bank
        if dropped := self._states.make_room(self._due.states_with_graphs(), self._most):
            self._captures.drop([key for key in bank.variants if key.state in dropped])
            self._due.forget_states(dropped)

    def _ask_for_place(self) -> bool:
        """Whether graphs may be captured in the state of now, be it in the place of others."""
        if self._states.ask_for_place(self._due.states_with_graphs(), self._most):
            return True
        self._captures.note(
            "the layers change between more states than may have graphs at once, and some stay eager "
            f"(STATE_CHANGED); cuda_graph_max_states is {self._most}"
        )
        return False

    # -- figures ---------------------------------------------------------------------------------

    def describe(self) -> str:
        """How many states have graphs, and what is no part of a state, for the log."""
        left_out = f", {_count(len(self._unguarded), 'name')} left out" if self._unguarded else ""
        return f"{_count(len(self._states_with_graphs()), 'state')} captured{left_out}"

    def _states_with_graphs(self) -> list[int]:
        bank = self._captures.bank
        return sorted({key.state for key in bank.variants})

    def report(self) -> dict[str, Any]:
        """Which states have graphs, what made them others, and what is no part of a state, by name."""
        return {
            "states": [self._made_new.get(it, "the first one") for it in self._states_with_graphs()],
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
