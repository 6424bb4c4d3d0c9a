# SPDX-License-Identifier: Apache-2.0
"""The kinds of one model's micro-batches: which are due now, and what their states explain."""

from collections import Counter, defaultdict
from collections.abc import Collection

from megagraph.decide.due import DueKinds
from megagraph.decide.reasons import EagerReason
from megagraph.log import log
from megagraph.megatron.graphs.layer_states import LayerStates
from megagraph.megatron.graphs.micro_batch import Kind

__all__ = ["Kinds"]


class Kinds(DueKinds[Kind]):
    """The kinds so far.

    Args:
        states: knows the state that layers are in.
        warm_up_steps: training steps before the first capture.
    """

    def __init__(self, states: LayerStates, warm_up_steps: int) -> None:
        super().__init__(lambda kind: kind.family, self._steps_of)
        self._states = states
        self._warm_up_steps = warm_up_steps
        self._of_sizes: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._is_warm = False  # some kind with gradients was captured

    def _steps_of(self, kind: Kind) -> int:
        # Other states of a model that is warm need to be seen once.
        return self._warm_up_steps if kind.grad and not self._is_warm else 1

    def due_now(self) -> set[Kind]:
        """What is due in the state of now; the rest is passed over."""
        if not self._states.has_place(self.states_with_graphs()):
            return set()
        state = self._states.current
        wanted = {kind if self._is_met_again(kind) else kind._replace(state=state) for kind in self.due}
        in_other_states = {kind for kind in wanted if kind.state != state}
        self.pass_over(in_other_states)
        return wanted - in_other_states

    def _is_met_again(self, kind: Kind) -> bool:
        """Whether its state may be waited for. Where each training step has had another one, no state may.

        A capture finds out whether calls of some layer change its state; the others have graphs then.
        """
        return self._is_warm or not kind.grad or not self.never_recurs(kind)

    def mark_captured(self, kinds: Collection[Kind]) -> None:
        """Takes kinds for captured."""
        super().mark_captured(kinds)
        self._is_warm = self._is_warm or any(kind.grad for kind in kinds)

    def states_with_graphs(self) -> set[int]:
        """The numbers of the states that captured kinds are in."""
        return {kind.state for kind in self.captured}

    def forget_states(self, states: Collection[int]) -> None:
        """Kinds in some states are as if they had never occurred."""
        self.forget(lambda kind: kind.state in states)

    def forget_old_states(self) -> None:
        """Forgets states that were not used for long; those with graphs stay, and find them again."""
        self.forget_states(self._states.forget_oldest(self.states_with_graphs()))

    def explain(self, kind: Kind, reason: EagerReason) -> EagerReason:
        """Says of an eager micro-batch whether its state is the reason, counts it, and remembers that state.

        Args:
            kind: of the micro-batch.
            reason: why it runs eager, as far as graphs know.
        """
        if reason is EagerReason.NUMERICS_CHANGED:  # since the step began
            self.note(kind._replace(state=self._states.under_settings_of_now()))
        others = [other.state for other in self.captured_of_family(kind)]
        if others and reason is EagerReason.WARMING_UP and kind not in self.captured:
            reason = self._states.eager_reason(kind.state, others)
        self.count(kind, reason)
        return reason

    def count(self, kind: Kind, reason: EagerReason | None) -> None:
        """Counts a micro-batch by the number of ranks that share it; None for one that replayed."""
        self._of_sizes[kind.cp_size]["replayed" if reason is None else reason.name] += 1

    def report_sizes(self) -> dict[str, dict[str, int]]:
        """These counts as plain values, by size in words."""
        return {str(size): dict(counts) for size, counts in sorted(self._of_sizes.items())}

    def awaits_graphs(self, kind: Kind, reason: EagerReason) -> bool:
        """Whether an eager micro-batch is of a kind, or in settings, for which nothing was captured yet."""
        return kind not in self.captured or reason is EagerReason.NUMERICS_CHANGED

    def log_passed_over(self, kinds: Collection[Kind]) -> None:
        """Says of kinds that no capture has met them."""
        for kind in kinds:
            log.warning(
                "micro-batches %s gradients stay eager in steps that begin in another state: layers are "
                "captured between steps, in the state they have there (train() or eval(), adapters, hooks)",
                "with" if kind.grad else "without",
            )
