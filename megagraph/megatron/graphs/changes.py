# SPDX-License-Identifier: Apache-2.0
"""What has changed before a step: drops the graphs that relied on it, and says what runs eager for it.

Says what may be captured then, too; captures nothing.

Moved parameters and buffers, replaced generators, other trainable parameters and other modules release the
whole bank, and another one begins, whose counters go on. If main gradients alone have moved, only the
variants that read them are dropped, and their memory in the pools goes to the next capture. A model that is
suspended keeps its graphs.
"""

import gc
from collections.abc import Sequence

import torch

from megagraph import _C
from megagraph.decide.dispatch import VariantKey
from megagraph.decide.reasons import EagerReason
from megagraph.log import log
from megagraph.megatron.graphs.block_bank import BlockBank
from megagraph.megatron.graphs.layer_states import LayerStates
from megagraph.megatron.graphs.shared_kinds import SharedKinds
from megagraph.megatron.parallel.peers import Peers

__all__ = ["Changes"]

_DISAGREED, _MOVED = EagerReason.GROUP_DISAGREED, EagerReason.ADDRESS_MOVED


class Changes:
    """What keeps the running step eager, here or on another rank of the group.

    Args:
        block: the graphs.
        peers: the ranks that drop and run alike.
        dispatcher: is told what runs eager, and whose graphs have gone.
        states: learns which state the group is in.

    Attributes:
        reason: why every micro-batch of the step runs eager, or None.
        gradients_reason: why those do whose graphs add to main gradients, or None.
        has_resumed: the host has announced that what moved up to now has moved.
        is_suspended: it has announced that something may move, and nothing is to be replayed.
        has_raised: the last step has, and may have left tensors of its micro-batches behind.
    """

    def __init__(
        self, block: BlockBank, peers: Peers, dispatcher: _C.Dispatcher, states: LayerStates
    ) -> None:
        self._block = block
        self._peers = peers
        self._dispatcher, self._due = dispatcher, dispatcher.due
        self._states = states
        self._shared = SharedKinds(peers)
        self._has_moved = False  # without an announcement: what moves once moves again
        self.reason: EagerReason | None = None
        self.gradients_reason: EagerReason | None = None
        self.has_resumed = False
        self.is_suspended = False
        self.has_raised = False

    def suspend(self) -> None:
        """No replays until `resume()`."""
        self.is_suspended = True
        self._dispatcher.set_suspended(True)

    def resume(self) -> None:
        """Replays again; memory that moved meanwhile is captured anew at the next step boundary."""
        self.has_resumed = self.has_resumed or self.is_suspended
        self.is_suspended = False
        self._dispatcher.set_suspended(False)

    @property
    def keep_training_eager(self) -> bool:
        """Whether the step that begins replays no training graph."""
        return self.is_suspended or self.reason is not None or self.gradients_reason is not None

    def look(self, *, runs_eager: bool, captures: bool) -> None:
        """Looks, and drops what must not be replayed any more.

        Args:
            runs_eager: the step does so in any case.
            captures: what is due is captured right afterwards.
        """
        if self.has_raised:
            self._clean_up()
        watch = self._block.watch
        changed = None if runs_eager else self._block.what_changed()
        is_away = not runs_eager and watch.are_gradients_away
        said = self._states.local_state(has_changed=changed is not None)
        if changed is None and not is_away and self._peers.size == 1:  # as in nearly every step and bare call
            if said:
                self._states.agree(said)
            self.reason = self.gradients_reason = None
        else:
            self._agree(changed, said, is_away=is_away, runs_eager=runs_eager, captures=captures)
        self._dispatcher.keep_eager(self.reason, self.gradients_reason)

    def _agree(
        self,
        changed: EagerReason | None,
        said: Sequence[int],
        *,
        is_away: bool,
        runs_eager: bool,
        captures: bool,
    ) -> None:
        """Learns what keeps other ranks' steps eager, and drops the same graphs as they."""
        stops = changed if changed is not None and self._costs_step(changed, captures) else None
        is_partial = changed is None or self._block.have_only_gradients_moved
        self.reason = None if is_partial else stops
        self.gradients_reason = _MOVED if is_away else stops
        is_eager = runs_eager or self.reason is not None
        context = self._peers.context
        flags = changed is not None, is_eager, self.gradients_reason is not None, not context.is_whole
        has_changed, is_eager_anywhere, is_without_anywhere, is_broken, *heard = self._peers.max_over_ranks(
            [*map(int, flags), *said]
        )
        if said:
            self._states.agree(heard)
        if is_eager_anywhere and not is_eager:
            self.reason = _DISAGREED
        if is_without_anywhere and self.gradients_reason is None:
            self.gradients_reason = _DISAGREED
        if has_changed:
            self._drop(is_partial)
        if is_broken and context.is_whole:
            # Those ranks have dropped theirs: a pack that they share with this one is in no graph there.
            context.give_up()
            self.drop_everything()
            log.warning("other ranks have destroyed a group of theirs alone: nothing is captured any more")

    def due_anywhere(self, can_capture: bool) -> set[VariantKey]:
        """What is captured now, the same on all ranks; nothing while they want different graphs.

        Args:
            can_capture: shapes are known on this rank.
        """
        due = self._due_now() if can_capture else set()
        if self._peers.run_other_packs:
            # What others have met is captured here as well, so whatever keeps a capture back does so first.
            block = self._block
            is_held = torch.is_inference_mode_enabled() or bool(block.bank.holders())
            can_capture = can_capture and not is_held and block.has_memory(grad=False)
            has_gradients = self.gradients_reason is None and block.has_memory(grad=True)
            return self._shared.of_all(due, can_capture=can_capture, has_gradients=has_gradients)
        if self._peers.size > 1 and not self._peers.agree_on(repr(sorted(map(repr, due)))):
            log.warning("capture waits: ranks of the group want different graphs")
            return set()
        return due

    def _due_now(self) -> set[VariantKey]:
        """What may be captured: in the state of now alone; nothing while a slot is held or memory is away."""
        if not self._due.due or torch.is_inference_mode_enabled():
            return set()
        if not self._states.has_place(self._due.states_with_graphs()):
            return set()
        away, block = self.gradients_reason, self._block
        due = {
            kind
            for kind in self._due.due_in(self._states.current)
            if (away is None or not kind.grad) and block.has_memory(grad=kind.grad)
        }
        return due if due and block.is_idle() else set()

    def _clean_up(self) -> None:
        """After a step that raised: frees what is left of it, where the error and its frames are garbage."""
        self.has_raised = False
        bank, layers = self._block.bank, self._block.layers
        if bank.holders():
            layers.forget_calls()
            gc.collect()
        if holders := bank.holders():
            log.warning("a step that raised has left tensors that somebody holds: %s", holders)

    def _costs_step(self, changed: EagerReason, captures: bool) -> bool:
        """Whether a change costs an eager step: moves do not that were announced, or that are the rule."""
        if changed is not _MOVED or self.has_resumed:
            return changed is not _MOVED or not captures
        is_first, self._has_moved = not self._has_moved, True
        return is_first or not captures

    def drop_everything(self) -> None:
        """Drops all graphs, on this rank."""
        self._block.reset()
        self._due.forget_graphs()

    def _drop(self, is_partial: bool) -> None:
        """Drops the same graphs on all ranks: all of them where one rank cannot keep some."""
        bank = self._block.bank
        (everything,) = self._peers.max_over_ranks([int(not is_partial or bool(bank.holders()))])
        if everything:
            self.drop_everything()
        else:
            self._block.drop_gradients()
            self._due.forget_graphs(only_training=True)
