# SPDX-License-Identifier: Apache-2.0
"""The graphs of one model: decides on each micro-batch, captures at step boundaries. Patches nothing."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.bank.bank import Progress
from megagraph.config import GraphConfig
from megagraph.decide.dispatch import VariantKey
from megagraph.decide.reasons import EagerReason
from megagraph.log import about, log
from megagraph.megatron.graphs.block_bank import BlockBank
from megagraph.megatron.graphs.capacities import Capacities
from megagraph.megatron.graphs.changes import Changes
from megagraph.megatron.graphs.dispatcher import Dispatcher
from megagraph.megatron.graphs.entry import Entries
from megagraph.megatron.graphs.experts import ranks_of_experts, rows_are_samples
from megagraph.megatron.graphs.layer_arguments import LayerArguments
from megagraph.megatron.graphs.layer_states import LayerStates
from megagraph.megatron.graphs.micro_batch import BatchRules, MicroBatch, is_mask
from megagraph.megatron.graphs.positions import OwnTables
from megagraph.megatron.graphs.refusals import Refusal, check_graph_options, refusal_of
from megagraph.megatron.graphs.walk import LayerLoop
from megagraph.megatron.parallel.ddp import find_ddp
from megagraph.megatron.parallel.model_parallel import has_experts, need_equal_rows, require_rows
from megagraph.megatron.parallel.peers import HostGroup, Peers
from megagraph.megatron.seams import PACKED_SEQ_PARAMS

__all__ = ["ModelGraphs"]

# Some calls of such a forward may not reach Megatron's, nor whatever pads.
_NEEDS_MEGATRONS = (
    "experts over several ranks that need equal rows, in a model with a forward that overrides Megatron's, "
    "are not supported yet"
)


class ModelGraphs:
    """Everything the plugin knows of one model.

    Args:
        model: the GPTModel or HybridModel.
        ddp: Megatron's DDP around it, or None.
        config: the plugin's options.
        progress: shown while capturing.
        name: for the log and the report; by default the model's class.

    Attributes:
        entries: how it and its block are entered.
        verifier: keeps micro-batches that graphs are verified on.
        peers, tensor: the ranks that run the same packs; those that share its layers.
        view: shows it the ranks that share a micro-batch.
        changes, dispatcher: what keeps a step eager; which variant takes a pack.
        refusal: why the whole model stays eager, or None.
        masks_at_entry: every micro-batch has a padding mask, which its ranks share with the rows.
        needs_equal_rows: ranks of other packs run as many rows in each micro-batch.
        hands_on: another stage or chunk of a pipeline gets its hidden states.
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
        self._config, self._progress = config, progress
        self.name = name or type(model).__name__
        self._model = weakref.ref(model)
        self.entries = Entries(model)
        self.hands_on = not getattr(model, "post_process", True)
        self.peers = Peers(model, config.cp_sizes)
        self.tensor, context, self.view = self.peers.tensor, self.peers.context, self.peers.view
        self.needs_equal_rows = need_equal_rows(model.config)
        self._capacities = Capacities(
            config, context.size, context.sizes, need_equal_rows=self.needs_equal_rows
        )
        own: ModelGraphs = weakref.proxy(self)  # what the dispatcher holds must not lead back to it
        constants = LayerArguments(self._model, lambda: own.entries.model.is_own is False)
        self._tables = OwnTables(model, constants.make)
        masks_tail = has_experts(model.config)
        self.masks_at_entry = masks_tail and self.tensor.shards_sequence
        self._rules = BatchRules(
            tail=config.tail,
            masks_tail=masks_tail,
            pads_at_entry=self.tensor.shards_sequence,
            needs_every_row=self.needs_equal_rows,
            own_tables=self._tables,
        )
        self.dispatcher = Dispatcher(config, self._capacities, self._rules, self.peers)
        self._due = self.dispatcher.due
        self.block = BlockBank(
            model,
            ddp,
            self.peers,
            config,
            constants,
            self.dispatcher,
            may_join=lambda: self.entries.are_megatrons,
        )
        self._states = LayerStates(
            self.block, self.dispatcher.states, self.peers, config.cuda_graph_max_states
        )
        self.verifier = self.block.verifier
        self.refusal: Refusal | None = None
        self._learners: HostGroup = self.peers
        self._failures: list[str] = []
        self._refuse(refusal_of(model, ddp, self.block.scopes, self._config))
        if self.refusal is None:
            self._capacities.check(self.tensor.rows)
            if self.needs_equal_rows:
                self._learners = ranks_of_experts(model)
        self._rows: tuple[torch.Size, torch.dtype] | None = None  # shape and type of one
        self._params_type: Any = PACKED_SEQ_PARAMS.function()  # until a graph could take another
        # The running one, without a capacity yet: its key, pack, and what staging will read of such.
        self._unlearned: tuple[VariantKey, Any, list[Tensor]] | None = None
        self.changes = Changes(self.block, self.peers, self.dispatcher, self._states)
        if self.refusal is None and config.mode == "graph":
            self._states.agree(self.peers.max_over_ranks(self._states.local_state(has_changed=False)))
        self._replayed_tokens = 0
        self.running: MicroBatch | EagerReason | None = None  # padded, or as given: what its forward runs now

    def _refuse(self, refusal: Refusal | None) -> None:
        """Keeps the whole model eager, and says so in the log and in the report."""
        self.refusal = refusal
        if refusal is not None:
            self.view.refuse(refusal.sentence)
            self.dispatcher.refuse(refusal.reason)
            self._failures.append(f"{self.name} {refusal.log()}")

    def eager_reason(self, params: Any, tokens: int) -> EagerReason | None:
        """Why no graph could take a pack of `tokens` rows; None where one could, or nothing is known yet."""
        if self.peers.run_other_packs:
            return EagerReason.GROUP_DISAGREED  # others may call the model less often
        # Another rank may be able to read its pack, and ask this one before its step what it has learned.
        if (self._learners.size > 1 and not self._capacities.known) or not self.entries.are_settled:
            return None
        return self.dispatcher.eager_reason(params, tokens)

    def decide(
        self, params: Any, tokens: int, mask: Any, *, is_mask_shared: bool, is_skipped: bool
    ) -> MicroBatch | EagerReason:
        """Decides how a micro-batch runs.

        Args:
            params: its pack, or None.
            tokens: physical tokens of its input.
            mask: the padding mask that the model was given, or None.
            is_mask_shared: layers get as many of its rows as they have of hidden states.
            is_skipped: graphs are switched off for this step.

        Returns:
            The micro-batch, to be padded to its capacity; or why it runs eager as it was given.
        """
        entries, self._unlearned = self.entries, None
        # What a forward of the host's makes of a mask shows where it calls its block.
        has_mask = (mask is not None or self.masks_at_entry) and entries.are_megatrons
        can_stage = not has_mask or (
            is_mask_shared and (mask is None or is_mask(mask, tokens, self.block.device))
        )
        if self._rules.masks_tail:
            can_stage = can_stage and not rows_are_samples(params)
        decided = self.dispatcher.enter(params, tokens, has_mask, can_stage, is_skipped, entries.are_settled)
        if isinstance(decided, EagerReason):
            return decided
        variant, reason, sources, has_no_graph = decided
        if self.view.is_on:
            params = self.view.of_layers(params)
        self._params_type = type(params)
        if variant.capacity is None:
            self._unlearned = variant.key, params, [*sources, mask] if has_mask else sources
            return EagerReason.WARMING_UP
        batch = MicroBatch(params, tokens, variant, reason, sources)
        if has_no_graph:
            assert reason is not None
            return batch.as_given(reason) if entries.are_megatrons else reason
        return batch if entries.are_megatrons or self._has_constants(batch) else EagerReason.WARMING_UP

    @contextlib.contextmanager
    def runs(self, batch: MicroBatch | EagerReason | None) -> Iterator[None]:
        """Around a forward of the model: says what it runs; None if that is not the plugin's."""
        outer, self.running = self.running, batch
        try:
            yield
        finally:
            self.running = outer

    def require_rows(self, tokens: int, reason: EagerReason) -> None:
        """Before a micro-batch runs as it was given: raises where other ranks run another number of rows."""
        rows = self._capacities.rows
        if rows is not None and self.refusal is None and self.entries.are_settled:
            require_rows(rows, tokens, reason)

    def reason_against_rows(self) -> EagerReason | None:
        """Why no rows may be added where the model is entered; None where they may.

        They stay, and whose rotary tables its layers get shows further in: a host's are for the rows given.
        Rows of padding reach no expert, so that layers of experts are never given a pack to find out with.
        """
        if self.masks_at_entry:
            return None
        if self._tables.are_handed_on is None:
            return EagerReason.WARMING_UP
        return None if self._tables.are_handed_on else EagerReason.SIGNATURE_CHANGED

    def look_at_table(self, table: Any, params: Any, hidden_states: Tensor) -> None:
        """Of a micro-batch that runs as given: notes whose rotary table it is, as far as that matters."""
        if self.tensor.shards_sequence and params is not None:
            self._tables.include(table, params, hidden_states)

    def _has_constants(self, batch: MicroBatch) -> bool:
        """Whether it is known what an overridden model's layers will be called with."""
        if self._rows is None:
            return False
        constants = self.block.constants
        failure = constants.find(batch, self.tensor.rows(batch.capacity.tokens), *self._rows)
        if failure is not None:
            self.entries.fail(failure)
        return failure is None

    def learns_from(self, reason: EagerReason) -> bool:
        """Whether a micro-batch that no graph takes shows what its block is called with."""
        # Its kind is to be captured although it runs as it was given; or others' kinds are.
        is_captured_later = reason in (EagerReason.WARMING_UP, EagerReason.SIGNATURE_CHANGED)
        return is_captured_later or (self._rows is None and self.peers.run_other_packs)

    def count_as_given(self, reason: EagerReason, hidden_states: Tensor | None = None) -> None:
        """Counts a micro-batch that no capacity holds, or none yet, or that cannot be acted on."""
        reason = reason if self.refusal is None else self.refusal.reason
        if hidden_states is not None and self.learns_from(reason):
            self._rows = hidden_states.shape[1:], hidden_states.dtype
            if self._unlearned is not None:
                self.verifier.keep_as_given(*self._unlearned, hidden_states)
        self._unlearned = None
        self.block.count_eager(reason)

    def begin(self, batch: MicroBatch, hidden_states: Tensor, table: Any, mask: Any) -> LayerLoop | None:
        """Leases a slot for a micro-batch and returns the loop that replays it; None runs it eager.

        Counts an eager micro-batch. `end()` ends one that replays.

        Args:
            batch: the micro-batch.
            hidden_states: what the block was given.
            table: the rotary table that the block was given.
            mask: the padding mask that a block of Megatron's was given.
        """
        is_masked = batch.variant.has_mask and not (mask is None and batch.is_as_given)
        has_mask = is_masked or (mask is not None and self.entries.are_megatrons)
        if has_mask and not batch.take_mask(mask, hidden_states):
            self.run_as_given(batch, table, hidden_states)
            return None
        loop = None
        if batch.reason is None:
            batch.reason = self.dispatcher.begin(batch.key, batch.sources)
            if batch.reason is None:
                loop = self.block.loops[batch.key]
                loop.batch = batch
            else:
                self.peers.run_alone(batch.reason, batch.variant.cp_size)
        if batch.reason is not None:
            self._rows = hidden_states.shape[1:], hidden_states.dtype
            batch.reason = reason = self.dispatcher.explain(batch.key, batch.reason)
            has_other_rows = batch.is_as_given and self.tensor.shards_sequence
            # Nothing was captured for it, or in the settings of now.
            is_new = batch.key.kind not in self._due.captured or reason is EagerReason.NUMERICS_CHANGED
            if is_new and not has_other_rows:
                self.verifier.keep(batch, hidden_states)
            if not batch.is_own(table, hidden_states):
                batch.run_as_given(is_own_table=False)
            self.block.count_eager(batch.reason)
        elif self.verifier.every:
            self.verifier.keep_replayed(batch, hidden_states)
        return loop

    def run_as_given(self, batch: MicroBatch, table: Any, hidden_states: Tensor) -> None:
        """Has a micro-batch run as given whose layers are handed what no variant takes, and counts it."""
        batch.reason = EagerReason.SIGNATURE_CHANGED
        batch.run_as_given(is_own_table=batch.is_own(table, hidden_states))
        self.block.count_eager(batch.reason)

    def end(self, batch: MicroBatch, loop: LayerLoop) -> None:
        """Ends a micro-batch for which `begin()` returned a loop, which may have found a reason since."""
        loop.batch = None
        self.dispatcher.end()
        if self.view.is_on:
            self.dispatcher.count(batch.key, batch.reason)
        if batch.reason is None:
            self._replayed_tokens += batch.capacity.tokens
        else:
            self.block.count_eager(batch.reason)

    def look_for_ddp(self, models: Sequence[nn.Module]) -> None:
        """Looks in `models` of a schedule for the DDP around it, unknown to a forward before its step."""
        model = None if self.block.has_ddp else self._model()
        ddp = None if model is None else find_ddp(models, model)
        if model is None or ddp is None:
            return
        self.block.adopt_ddp(ddp)
        self._due.forget_graphs()
        if self.refusal is None:
            self._refuse(refusal_of(model, ddp, self.block.scopes, self._config))

    def look_at_forwards(self) -> None:
        """Before a step: finds out anew where to act if the model or its block has another forward by now."""
        model = self._model()
        if model is not None:
            self.entries = self.entries.of_now(model)

    def _settle_entries(self) -> None:
        """Says what overrides Megatron's forwards, and refuses the model where that cannot be served."""
        entries = self.entries
        failure = entries.settle()
        if entries.are_settled and not entries.are_megatrons:
            self.view.refuse("a forward that overrides Megatron's")
        if self.needs_equal_rows:
            failure = failure or _NEEDS_MEGATRONS
        if failure and self.refusal is None:
            self._refuse(Refusal(reason=EagerReason.SCOPE_UNSUPPORTED, sentence=failure))

    def at_bare_call(self) -> None:
        """Before a forward inside another model's step: looks for changes, captures nothing."""
        if not self.entries.are_settled:
            self._settle_entries()
        if self.refusal is None and self._config.mode == "graph":
            self.changes.look(runs_eager=self.changes.is_suspended, captures=False)

    def at_step_boundary(self, *, is_skipped: bool) -> None:
        """Before a step: learns capacities, looks for what changed, captures what is due.

        What changed costs one eager step; the next boundary captures again. Moved memory costs none after
        `resume()`, nor when it has moved before. What has no memory now, or is in other modes, waits.
        """
        if not self.entries.are_settled:
            self._settle_entries()
        if self.view.is_on:
            self.view.follow()
            self.dispatcher.heed_groups()
        if self.refusal is not None:
            return
        capacities, due = self._capacities, self._due
        if not capacities.by_cp_size and capacities.learn(
            self.dispatcher.observed, bool(due.warmed_up), self._learners.max_over_ranks
        ):
            self.dispatcher.follow_capacities()
        if self._config.mode != "graph":
            return
        changes = self.changes
        runs_eager = is_skipped or changes.is_suspended
        changes.look(runs_eager=runs_eager, captures=True)
        if runs_eager:
            return
        changes.has_resumed = False
        if changes.reason is not None:
            return
        if self.verifier.pending is not None and not self.block.is_still_right():
            due.forget_graphs()
            return
        if self._states.are_many:  # those with graphs stay, and are found again
            due.forget_states(self._states.forget_oldest(due.states_with_graphs()))
        can_capture = self._rows is not None and bool(capacities.by_cp_size)
        if (due.due or self.peers.size > 1) and (kinds := changes.due_anywhere(can_capture)):
            self._capture(kinds)

    @property
    def may_replay_training(self) -> bool:
        """Whether there are training graphs, and nothing keeps them from the step that begins."""
        return not self.changes.keep_training_eager and any(kind.grad for kind in self._due.captured)

    def _capture(self, kinds: set[VariantKey]) -> None:
        assert self._rows is not None
        due, states = self._due, self._states
        self.block.drop_states(dropped := {*states.to_drop(due.states_with_graphs())})
        due.forget_states(dropped)
        is_first = not due.captured
        variants = self._capacities.variants(kinds)
        if not self.block.capture(variants, *self._rows, self._params_type, self._progress):
            due.forget_graphs()
        if is_first:
            states.follow_eager_layers()
        due.mark_captured(kinds)  # or they stay eager; what was captured before is due again
        self.verifier.forget_except(due.due)

    def after_step(self) -> None:
        """After a step: remembers which kinds of micro-batches it held."""
        for kind in self._due.end_step():
            with about(self.name):
                log.warning(
                    "micro-batches %s gradients stay eager in steps that begin in another state: layers "
                    "are captured between steps, in the state they have there (train() or eval(), "
                    "adapters, hooks)",
                    "with" if kind.grad else "without",
                )

    def leave_group(self, group: Any) -> None:
        """Drops every graph that holds collectives of a group that is about to go; None is every group."""
        if self.peers.use(group):
            self.peers.leave(group)
            self.changes.drop_everything()

    def release(self) -> None:
        """Drops every graph for good."""
        self.block.release()

    def counters(self) -> dict[str, int]:
        """Calls, replays and eager calls by reason."""
        return self.block.counters()

    def guards(self) -> str:
        """What is guarded and what was verified so far, in words."""
        return f"{self._states.describe(self._due.states_with_graphs())}; {self.verifier.describe()}"

    def report(self) -> dict[str, Any]:
        """Counters, padding and captures as plain values. Waits for the device."""
        counters, figures, valid = self.counters(), self.block.figures(), self.block.valid_tokens()
        return {
            "model": self.name,
            "calls": counters["calls"],
            "replays": counters["replays"],
            "eager": {reason.name: counters[reason.name] for reason in EagerReason if counters[reason.name]},
            "capacities": self._capacities.report(),
            "cp_sizes": self._report_sizes() if self.view.is_on else {},
            "padding_share": 1 - valid / self._replayed_tokens if self._replayed_tokens else None,
            **figures,
            **self._states.report(self._due.states_with_graphs()),
            "failures": [*self._failures, *figures["failures"]],
        }

    def _report_sizes(self) -> dict[str, dict[str, int]]:
        return {str(size): counts for size, counts in self.dispatcher.counts().items()}
