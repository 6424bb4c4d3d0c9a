# SPDX-License-Identifier: Apache-2.0
"""The graphs of one GPTModel: decides on each micro-batch and says at step boundaries what to capture.

Patches nothing; the seams call it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.bank.bank import Progress
from megagraph.config import GraphConfig
from megagraph.decide.dispatch import PackShape, decide
from megagraph.decide.reasons import EagerReason
from megagraph.log import log
from megagraph.megatron.graphs.block_bank import BlockBank
from megagraph.megatron.graphs.micro_batch import Kind, MicroBatch
from megagraph.megatron.graphs.refusals import Refusal, check_graph_options, refusal_of
from megagraph.megatron.graphs.variants import learn_capacities
from megagraph.megatron.scopes.layer import LayerLoop
from megagraph.packs.packing import PackForm, pack_shape

__all__ = ["ModelGraphs"]

_NO_PACK_METADATA = EagerReason.NO_PACK_METADATA
# Reasons of micro-batches whose kind is to be captured although they ran as they were given.
_CAPTURED_LATER = (EagerReason.WARMING_UP, EagerReason.SIGNATURE_CHANGED)


class ModelGraphs:
    """Everything the plugin knows of one GPTModel.

    Args:
        model: the GPTModel.
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
        self.config = config
        self.capacities = config.all_capacities()
        self.name = name or type(model).__name__
        self.refusal: Refusal | None = None
        self.block = BlockBank(
            model,
            ddp,
            tail=config.tail,
            poison=config.poison,
            annotate=config.cuda_graph_nvtx,
            progress=progress,
        )
        self._refuse(refusal_of(model, ddp))
        if self.refusal is None:
            for capacity in self.capacities:
                self.block.peers.rows(capacity.tokens)  # raises where ranks cannot share them
        self._observed: set[PackShape] = set()
        self._kinds: dict[Kind, int] = {}  # to the number of steps in which it occurred
        self._kinds_of_step: set[Kind] = set()
        self._captured: set[Kind] = set()
        self._rows: tuple[torch.Size, torch.dtype] | None = None  # shape and type of one
        self._params_type: type[Any] | None = None
        self._of_other_settings: set[Kind] = set()  # that had to run eager for it
        self._step_reason: EagerReason | None = None
        self._is_suspended = False
        self._has_resumed = False  # since the last step boundary
        self._replayed_tokens = 0
        self._tail = config.tail
        self._pads_at_entry = self.block.peers.shards_sequence
        # What its model's forward runs just now: a padded micro-batch, or one as it was given.
        self.running: MicroBatch | EagerReason | None = None

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
        if self.refusal is not None:
            return self.refusal.reason
        shape = None if params is None else pack_shape(params, tokens, self._tail)
        if shape is None:
            return _NO_PACK_METADATA
        form = PackForm.of(params)
        if form is None:
            return EagerReason.SIGNATURE_CHANGED
        if not self.capacities:
            self._observed.add(shape)
            self._note(params, Kind(form, torch.is_grad_enabled(), training))
            return EagerReason.WARMING_UP
        capacity = decide(shape, {shape.cp_size: self.capacities})
        if isinstance(capacity, EagerReason):
            return capacity
        kind = Kind(form, torch.is_grad_enabled(), training)
        self._note(params, kind)
        reason = self._why_not_now(kind, is_skipped)
        return MicroBatch(params, tokens, (capacity, kind), reason, self._tail, self._pads_at_entry)

    def _note(self, params: Any, kind: Kind) -> None:
        """Remembers what a capture will be for."""
        self._params_type = type(params)
        self._kinds_of_step.add(kind)

    def _why_not_now(self, kind: Kind, is_skipped: bool) -> EagerReason | None:
        if is_skipped or self.config.mode == "eager":
            return EagerReason.DISABLED
        if self._is_suspended:
            return EagerReason.SUSPENDED
        if kind.grad and self.block.watch.memory.are_gradients_away:
            return EagerReason.ADDRESS_MOVED
        return self._step_reason

    def run_as_given(self, reason: EagerReason, hidden_states: Tensor) -> None:
        """Counts a micro-batch that no capacity holds, or none yet."""
        if reason in _CAPTURED_LATER:
            self._rows = hidden_states.shape[1:], hidden_states.dtype
        self.block.count_eager(reason)

    def begin(self, batch: MicroBatch, hidden_states: Tensor) -> LayerLoop | None:
        """Leases a slot for a micro-batch and returns the loop that replays it; None runs it eager.

        Counts an eager micro-batch. `end()` ends one that replays.
        """
        self._rows = hidden_states.shape[1:], hidden_states.dtype
        if batch.reason is None:
            batch.reason = self.block.chain.begin(batch.key, batch.sources)
            if batch.reason is EagerReason.NUMERICS_CHANGED:
                self._of_other_settings.add(batch.kind)
        if batch.reason is not None:
            self.block.count_eager(batch.reason)
            return None
        tokens = batch.capacity.tokens
        self._replayed_tokens += tokens

        def refuse() -> None:
            self._replayed_tokens -= tokens
            self.block.count_eager(EagerReason.SIGNATURE_CHANGED)

        return LayerLoop(
            self.block.chain.specs,
            self.block.chain.sites,
            self.block.chain.replay_all,
            constants=self.block.constants[batch.key],
            equal_constants=self.block.equal_constants.setdefault(batch.key, {}),
            eager_input=batch.pad,
            eager_arguments=lambda: {"attention_mask": None, "packed_seq_params": batch.canonical_params()},
            refuse=refuse,
            before_layer=self.block.param_syncs.before_layers(),
        )

    def end(self) -> None:
        """Ends the micro-batch that `begin()` leased a slot for."""
        self.block.chain.end()

    # -- steps -----------------------------------------------------------------------------------

    def find_ddp(self, models: Sequence[nn.Module]) -> None:
        """Finds the DDP around the model, which a forward before its first step could not know."""
        if self.block.find_ddp(models):
            if self.refusal is None:
                self._refuse(self.block.refusal())
            self._captured.clear()

    def _refuse(self, refusal: Refusal | None) -> None:
        """Keeps the whole model eager, and says so in the log and in the report."""
        self.refusal = refusal
        if refusal is not None:
            sentence = f"stays eager ({refusal.reason.name}): {refusal.sentence}"
            log.warning(sentence)
            self.block.failures.append(f"{self.name} {sentence}")

    def at_bare_call(self) -> None:
        """Before a forward inside another model's step: looks for changes, captures nothing."""
        if self.refusal is None and self.config.mode == "graph":
            self._look_for_changes(runs_eager=self._is_suspended)

    def _look_for_changes(self, *, runs_eager: bool) -> None:
        """Finds out what keeps this step eager, here or on another rank of the group."""
        changed = None if runs_eager else self.block.what_changed()
        # A host that resumes has moved what it wanted to move: captured again in this very step.
        costs_step = changed is not None and not (self._has_resumed and changed is EagerReason.ADDRESS_MOVED)
        flags = [int(changed is not None), int(runs_eager or costs_step)]
        has_changed_anywhere, is_eager_anywhere = self.block.peers.exchange(flags)
        if has_changed_anywhere:
            self.block.reset()
            self._captured.clear()
        self._step_reason = changed if costs_step else None
        if is_eager_anywhere and not (runs_eager or costs_step):
            self._step_reason = EagerReason.GROUP_DISAGREED

    def at_step_boundary(self, *, is_skipped: bool) -> None:
        """Before a step: learns capacities, looks for what changed, captures what is due.

        What changed costs one eager step; the next boundary captures again. After `resume()`, moved
        memory costs none. What has no memory now is captured when it has.
        """
        self._step_reason = None
        if self.refusal is not None:
            return
        due = {kind for kind, steps in self._kinds.items() if steps >= self._warm_up_of(kind)}
        if due and not self.capacities:
            self._learn()
        if self.config.mode != "graph":
            return
        runs_eager = is_skipped or self._is_suspended
        self._look_for_changes(runs_eager=runs_eager)
        if runs_eager:
            return
        self._has_resumed = False
        if self._step_reason is not None:
            return
        # Settings that last: after one eager step further graphs, beside those of the former settings.
        self._captured -= self._of_other_settings & self.block.kinds_of_other_settings()
        due = {kind for kind in due - self._captured if self.block.watch.memory.is_there(grad=kind.grad)}
        if due and (self._rows is None or not self.block.is_idle()):
            due = set()
        peers = self.block.peers
        if peers.size > 1 and not peers.agree_on(repr(sorted(map(repr, due)))):
            log.warning("capture waits: ranks of the group want different graphs")
            return
        if due:
            self._of_other_settings -= due
            self._captured |= due
            assert self._rows is not None and self._params_type is not None
            is_kept = self.block.capture(
                self.capacities,
                due,
                row_shape=tuple(self._rows[0]),
                dtype=self._rows[1],
                params_type=self._params_type,
            )
            if not is_kept:
                self._captured = set(due)  # and stay eager; what was captured before is due again

    def after_step(self) -> None:
        """After a step: remembers which kinds of micro-batches it held."""
        for kind in self._kinds_of_step:
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
        self._kinds_of_step.clear()

    def _warm_up_of(self, kind: Kind) -> int:
        return self.config.cuda_graph_warmup_steps if kind.grad else 1

    def _learn(self) -> None:
        self.capacities = learn_capacities(self._observed, self.config.tail)
        counts = ",".join(str(capacity.num_seqs) for capacity in self.capacities)
        log.info(
            "learned from %d pack shapes; to fix them set cuda_graph_max_packed_seqs=%s and "
            "max_seqlen_per_dp_cp_rank=%d",
            len(self._observed),
            counts,
            self.capacities[0].tokens,
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
        if self.block.peers.use(group):
            self.block.peers.leave()
            self.block.reset()
            self._captured.clear()

    def release(self) -> None:
        """Drops every graph for good."""
        self.block.bank.release()

    def report(self) -> dict[str, Any]:
        """Counters, padding and captures as plain values. Waits for the device."""
        counters = self.block.counters()
        valid = self.block.valid_tokens()
        return {
            "model": self.name,
            "layers": self.block.num_layers,
            "calls": counters["calls"],
            "replays": counters["replays"],
            "eager": {reason.name: counters[reason.name] for reason in EagerReason if counters[reason.name]},
            "capacities": [
                {"tokens": c.tokens, "num_seqs": c.num_seqs, "max_seqlen": c.max_seqlen}
                for c in self.capacities
            ],
            "graphs": self.block.bank.num_graphs,
            "pool_bytes": self.block.bank.pool_bytes(),
            "capture_seconds": self.block.capture_seconds,
            "padding_share": 1 - valid / self._replayed_tokens if self._replayed_tokens else None,
            "failures": list(self.block.failures),
        }
