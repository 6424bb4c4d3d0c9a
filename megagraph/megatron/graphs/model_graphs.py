# SPDX-License-Identifier: Apache-2.0
"""The graphs of one GPTModel: decides on each micro-batch and says at step boundaries what to capture.

Patches nothing; the seams call it.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.bank.bank import Progress
from megagraph.config import GraphConfig
from megagraph.decide.dispatch import Capacity, PackShape, decide
from megagraph.decide.due import DueKinds
from megagraph.decide.learn import learn_capacities
from megagraph.decide.reasons import EagerReason
from megagraph.log import log
from megagraph.megatron.graphs.block_bank import BlockBank
from megagraph.megatron.graphs.micro_batch import Kind, MicroBatch
from megagraph.megatron.graphs.refusals import Refusal, check_graph_options, refusal_of
from megagraph.megatron.parallel.ddp import find_ddp
from megagraph.megatron.parallel.tensor import Peers
from megagraph.megatron.scopes.layer import LayerLoop
from megagraph.packs.packing import PackForm, has_own_cp_group, pack_shape

__all__ = ["ModelGraphs"]

_NO_PACK_METADATA, _WARMING_UP = EagerReason.NO_PACK_METADATA, EagerReason.WARMING_UP
# Reasons of micro-batches whose kind is to be captured although they ran as they were given.
_CAPTURED_LATER = (EagerReason.WARMING_UP, EagerReason.SIGNATURE_CHANGED)


class ModelGraphs:
    """Everything the plugin knows of one model.

    Args:
        model: the GPTModel or HybridModel.
        ddp: Megatron's DDP around it, or None.
        config: the plugin's options.
        progress: shown while capturing.
        name: for the log and the report; by default the model's class.
    """

    def __init__(
        self,
        model: nn.Module,
        ddp: nn.Module | None,
        config: GraphConfig,
        progress: Progress | None,
        name: str = "",
    ) -> None:
        check_graph_options(model.config)
        self._config = config
        self._capacities = config.all_capacities()
        self.name = name or type(model).__name__
        self._model = weakref.ref(model)
        self.peers = Peers(model)
        self.block = BlockBank(model, ddp, self.peers, config, progress)
        self._refusal: Refusal | None = None
        self._failures: list[str] = []
        self._refuse(refusal_of(model, ddp))
        if self._refusal is None:
            for capacity in self._capacities:
                self.peers.rows(capacity.tokens)  # raises where ranks cannot share them
        self._kinds: DueKinds[Kind] = DueKinds(self._warm_up_of)
        self._observed: set[PackShape] = set()
        self._rows: tuple[torch.Size, torch.dtype] | None = None  # shape and type of one
        self._params_type: type[Any] | None = None
        self._step_reason: EagerReason | None = None
        self._is_suspended = False
        self._has_resumed = False  # since the last step boundary
        self._replayed_tokens = 0
        self._tail = config.tail
        # What its model's forward runs just now: a padded micro-batch, or one as it was given.
        self.running: MicroBatch | EagerReason | None = None

    def _refuse(self, refusal: Refusal | None) -> None:
        """Keeps the whole model eager, and says so in the log and in the report."""
        self._refusal = refusal
        if refusal is not None:
            sentence = f"stays eager ({refusal.reason.name}): {refusal.sentence}"
            log.warning(sentence)
            self._failures.append(f"{self.name} {sentence}")

    # -- micro-batches ---------------------------------------------------------------------------

    def decide(
        self, params: Any, tokens: int, *, training: bool, is_skipped: bool
    ) -> MicroBatch | EagerReason:
        """Decides how a micro-batch runs, from its shapes and host integers alone.

        Args:
            params: its `PackedSeqParams`, or None.
            tokens: physical tokens of its input.
            training: whether the model is in training mode.
            is_skipped: graphs are switched off for this step.

        Returns:
            The micro-batch, to be padded to its capacity; or why it runs eager as it was given.
        """
        if self._refusal is not None:
            return self._refusal.reason
        shape = None if params is None else pack_shape(params, tokens, self._tail)
        if shape is None:
            return _NO_PACK_METADATA
        form = PackForm.of(params)
        if form is None or torch.is_inference_mode_enabled():
            return EagerReason.SIGNATURE_CHANGED
        capacity: Capacity | None = None  # while capacities are still to be learned
        if self._capacities:
            found = decide(shape, {shape.cp_size: self._capacities})
            if isinstance(found, EagerReason):
                return found
            capacity = found
        if has_own_cp_group(params):
            return EagerReason.CP_SIZE_NOT_CAPTURED
        kind = Kind(form, torch.is_grad_enabled(), training)
        self._note(params, kind)
        if capacity is None:
            self._observed.add(shape)
            return _WARMING_UP
        reason = self._why_not_now(kind, is_skipped)
        return MicroBatch(params, tokens, (capacity, kind), reason, self._tail, self.peers.shards_sequence)

    def _note(self, params: Any, kind: Kind) -> None:
        """Remembers what a capture will be for."""
        self._params_type = type(params)
        self._kinds.note(kind)

    def _why_not_now(self, kind: Kind, is_skipped: bool) -> EagerReason | None:
        if is_skipped or self._config.mode == "eager":
            return EagerReason.DISABLED
        if self._is_suspended:
            return EagerReason.SUSPENDED
        if kind.grad and self.block.are_gradients_away:
            return EagerReason.ADDRESS_MOVED
        return self._step_reason

    def count_as_given(self, reason: EagerReason, hidden_states: Tensor) -> None:
        """Counts a micro-batch that no capacity holds, or none yet."""
        if reason in _CAPTURED_LATER:
            self._rows = hidden_states.shape[1:], hidden_states.dtype
        self.block.count_eager(reason)

    def begin(self, batch: MicroBatch, hidden_states: Tensor) -> LayerLoop | None:
        """Leases a slot for a micro-batch and returns the loop that replays it; None runs it eager.

        Counts an eager micro-batch. `end()` ends one that replays.
        """
        self._rows = hidden_states.shape[1:], hidden_states.dtype
        loop = self.block.begin(batch) if batch.reason is None else None
        if batch.reason is not None:
            if batch.reason is EagerReason.NUMERICS_CHANGED:
                self._kinds.note_other_settings(batch.kind)
            self.block.count_eager(batch.reason)
        return loop

    def end(self, batch: MicroBatch) -> None:
        """Ends the micro-batch that `begin()` leased a slot for; the loop may have found a reason since."""
        self.block.end(batch)
        if batch.reason is None:
            self._replayed_tokens += batch.capacity.tokens
        else:
            self.block.count_eager(batch.reason)

    # -- steps -----------------------------------------------------------------------------------

    def look_for_ddp(self, models: Sequence[nn.Module]) -> None:
        """Looks for the DDP around the model, which a forward before its first step could not know.

        Args:
            models: what a schedule was given.
        """
        model = None if self.block.has_ddp else self._model()
        ddp = None if model is None else find_ddp(models, model)
        if model is None or ddp is None:
            return
        self.block.adopt_ddp(ddp)
        self._kinds.forget_graphs()
        if self._refusal is None:
            self._refuse(refusal_of(model, ddp))

    def at_bare_call(self) -> None:
        """Before a forward inside another model's step: looks for changes, captures nothing."""
        if self._refusal is None and self._config.mode == "graph":
            self._look_for_changes(runs_eager=self._is_suspended)

    def _look_for_changes(self, *, runs_eager: bool) -> None:
        """Finds out what keeps this step eager, here or on another rank of the group."""
        changed = None if runs_eager else self.block.what_changed()
        if changed is None and self.peers.size == 1:  # as in nearly every step, and every bare call
            self._step_reason = None
            return
        # A host that resumes has moved what it wanted to move: captured again in this very step.
        costs_step = changed is not None and not (self._has_resumed and changed is EagerReason.ADDRESS_MOVED)
        flags = [int(changed is not None), int(runs_eager or costs_step)]
        has_changed_anywhere, is_eager_anywhere = self.peers.exchange(flags)
        if has_changed_anywhere:
            self._drop_graphs()
        self._step_reason = changed if costs_step else None
        if is_eager_anywhere and not (runs_eager or costs_step):
            self._step_reason = EagerReason.GROUP_DISAGREED

    def at_step_boundary(self, *, is_skipped: bool) -> None:
        """Before a step: learns capacities, looks for what changed, captures what is due.

        What changed costs one eager step; the next boundary captures again. After `resume()`, moved
        memory costs none. What has no memory now is captured when it has.
        """
        self._step_reason = None
        if self._refusal is not None:
            return
        if not self._capacities and self._kinds.warmed_up:
            self._learn()
        if self._config.mode != "graph":
            return
        runs_eager = is_skipped or self._is_suspended
        self._look_for_changes(runs_eager=runs_eager)
        if runs_eager:
            return
        self._has_resumed = False
        if self._step_reason is not None:
            return
        # Settings that last: after one eager step further graphs, beside those of the former settings.
        self.block.use_graphs_of_current_settings()
        if self._kinds.under_other_settings:
            self._kinds.reopen(self.block.kinds_without_current_graphs())
        due = self._due() if self._kinds.due else set()
        if self.peers.size > 1 and not self.peers.agree_on(repr(sorted(map(repr, due)))):
            log.warning("capture waits: ranks of the group want different graphs")
        elif due:
            self._capture(due)

    @property
    def may_replay_training(self) -> bool:
        """Whether there are training graphs, and nothing keeps them from the step that begins."""
        is_eager = self._is_suspended or self._step_reason is not None
        return not is_eager and any(kind.grad for kind in self._kinds.captured)

    def _due(self) -> set[Kind]:
        """What to capture now: nothing while somebody holds a slot or memory is away."""
        due = {kind for kind in self._kinds.due if self.block.has_memory(grad=kind.grad)}
        return due if due and self._rows is not None and self.block.is_idle() else set()

    def _capture(self, due: set[Kind]) -> None:
        assert self._rows is not None and self._params_type is not None
        row_shape, dtype = self._rows
        is_kept = self.block.capture(self._capacities, due, tuple(row_shape), dtype, self._params_type)
        if not is_kept:
            self._kinds.forget_graphs()
        self._kinds.mark_captured(due)  # or they stay eager; what was captured before is due again

    def _drop_graphs(self) -> None:
        self.block.reset()
        self._kinds.forget_graphs()

    def after_step(self) -> None:
        """After a step: remembers which kinds of micro-batches it held."""
        self._kinds.end_step()

    def _warm_up_of(self, kind: Kind) -> int:
        return self._config.cuda_graph_warmup_steps if kind.grad else 1

    def _learn(self) -> None:
        self._capacities = learn_capacities(self._observed, self._tail.extra_seqs)
        counts = ",".join(str(capacity.num_seqs) for capacity in self._capacities)
        log.info(
            "learned from %d pack shapes; to fix them set cuda_graph_max_packed_seqs=%s and "
            "max_seqlen_per_dp_cp_rank=%d",
            len(self._observed),
            counts,
            self._capacities[0].tokens,
        )

    # -- life ------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """No replays until `resume()`."""
        self._is_suspended = True

    def resume(self) -> None:
        """Replays again; memory that moved meanwhile is captured anew at the next step boundary."""
        self._has_resumed = self._has_resumed or self._is_suspended
        self._is_suspended = False

    def leave_group(self, group: Any) -> None:
        """Drops every graph that holds collectives of a group that is about to go; None is every group."""
        if self.peers.use(group):
            self.peers.leave()
            self._drop_graphs()

    def release(self) -> None:
        """Drops every graph for good."""
        self.block.release()

    def counters(self) -> dict[str, int]:
        """Calls, replays and eager calls by reason."""
        return self.block.counters()

    def report(self) -> dict[str, Any]:
        """Counters, padding and captures as plain values. Waits for the device."""
        counters, figures = self.counters(), self.block.figures()
        valid = self.block.valid_tokens()
        return {
            "model": self.name,
            "calls": counters["calls"],
            "replays": counters["replays"],
            "eager": {reason.name: counters[reason.name] for reason in EagerReason if counters[reason.name]},
            "capacities": [dataclasses.asdict(capacity) for capacity in self._capacities],
            "padding_share": 1 - valid / self._replayed_tokens if self._replayed_tokens else None,
            **figures,
            "failures": [*self._failures, *figures["failures"]],
        }
