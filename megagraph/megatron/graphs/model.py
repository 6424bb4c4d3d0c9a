# SPDX-License-Identifier: Apache-2.0
"""One model and its graphs: what each micro-batch does, when graphs are captured, and the report.

Patches nothing, and does not know how graphs are captured.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph._C import VariantKey
from megagraph.config import GraphConfig
from megagraph.log import PATIENCE, about, log, subject
from megagraph.megatron.graphs.captures import Captures
from megagraph.megatron.graphs.changes import Changes
from megagraph.megatron.graphs.dispatcher import Dispatcher, MicroBatch
from megagraph.megatron.graphs.entry import Doors, Entries
from megagraph.megatron.graphs.layer_arguments import LayerArguments
from megagraph.megatron.graphs.refusals import Refusal, check_graph_options, refusal_of
from megagraph.megatron.parallel.ddp import find_ddp
from megagraph.megatron.parallel.groups import ranks_of
from megagraph.megatron.parallel.model_parallel import TensorRanks, has_experts
from megagraph.megatron.parallel.peers import HostGroup, Peers
from megagraph.megatron.scopes.parts import experts_of
from megagraph.megatron.watch import weakly
from megagraph.reasons import EagerReason

__all__ = ["GraphedModel"]

# Options that change nothing of what ranks do together.
_OF_A_RANK = ("progress", "poison", "report", "log_interval", "cuda_graph_nvtx")
_MISFITS = EagerReason.TOO_MANY_TOKENS, EagerReason.TOO_MANY_SEQUENCES, EagerReason.SEQUENCE_TOO_LONG
_MOST_MISFITS = 0.05  # of the calls of an interval, before somebody is told
# Of what runs as it was given for these, the kind is captured later.
_CAPTURED_LATER = EagerReason.WARMING_UP, EagerReason.SIGNATURE_CHANGED
# Some calls of such a forward may not reach Megatron's, nor whatever pads.
_NEEDS_MEGATRONS = (
    "experts over several ranks that need equal rows, in a model with a forward that overrides Megatron's, "
    "are not supported yet"
)
_HAS_NO_LAYERS = "its block has no layers any more"
# The row lists among a model's arguments, [1, T] each, beside its padding mask.
_ROW_LISTS = ("input_ids", "position_ids", "labels", "loss_mask")
# What an output processor gets as the caller passed it; its hidden states are cut.
_HANDED_ON = (*_ROW_LISTS, "decoder_input", "packed_seq_params")

_KEPT_BACK = "nothing is captured"  # so far


def _ranks_of_experts(model: Any) -> HostGroup:
    """The ranks that the experts of a model's layers are spread over."""
    # In all layers; looked up once, since other ranks would have other experts.
    mixtures = (found for layer in model.decoder.layers if (found := experts_of(layer)) is not None)
    spread_over = [ranks_of(mixture.token_dispatcher.tp_ep_group) for mixture in mixtures]
    return HostGroup(next(iter(spread_over), frozenset()), "share the experts")


class GraphedModel:
    """Everything the plugin knows of one GPTModel or HybridModel, which it holds weakly."""

    def __init__(self, model: Any, ddp: nn.Module | None, config: GraphConfig, name: str) -> None:
        check_graph_options(model.config)
        self.model, self._config, self.name = weakref.ref(model), config, name
        self.entries = Entries(model)
        self.lock = threading.RLock()  # a call holds it: another thread's waits
        # Another stage or chunk of a pipeline gets its hidden states.
        self.hands_on = not getattr(model, "post_process", True)
        self.peers = Peers(model, config.cp_sizes)
        self.tensor, self.context = self.peers.tensor, self.peers.context
        self._arguments = LayerArguments(model, self.entries)
        self.dispatcher = Dispatcher(model.config, config, self._arguments, self.peers)
        self._due = self.dispatcher.due
        self.captures = Captures(model, ddp, config, self.peers, self._arguments, self.dispatcher)
        self.verifier = self.captures.verifier
        self.changes = Changes(self.captures, self.peers, self.dispatcher, config.cuda_graph_max_states)
        self.refusal: Refusal | None = None  # why the whole model stays eager
        self._asked_in: tuple[int, Doors] | None = None  # the state and the doors with which that was asked
        self._refuse(self._find_refusal())
        are_late = any(spec.finish is not None for spec in self.captures.specs)
        if self.refusal is None and model.config.delay_wgrad_compute and not are_late:
            log.warning(
                "delay_wgrad_compute delays nothing in graphs: only Transformer Engine's linear layers make "
                "gradients of their weights later"
            )
        shared = {name: value for name, value in vars(config).items() if name not in _OF_A_RANK}
        shared["cuda_graph_warmup_steps"] = self.dispatcher.warm_up_steps
        # Of capacities.
        self._learners = _ranks_of_experts(model) if self.dispatcher.needs_equal_rows else self.peers
        for ranks in (self.peers, self._learners):
            ranks.compare({**shared, "what keeps the model eager": str(self.refusal)})
        self._begin()
        self._settle_entries()
        self._row: Tensor | None = None  # one of hidden states, on no device
        # Why one that no graph takes shows what its block is called with: for any reason, if others run kinds
        # that this rank has not met, until there is a row.
        self.learns_from = tuple(EagerReason) if self.peers.run_other_packs else _CAPTURED_LATER
        self.unlearned: MicroBatch | None = None  # the running one, for which there is no capacity yet
        # What a forward of it runs, padded or as given; None around one that is not the plugin's.
        self.running: MicroBatch | EagerReason | None = None
        self.end_plan: Callable[[], None] | None = None  # ends the one that has leased a slot
        self._training_steps, self._has_told_of_misfits = 0, False
        self._kept_back = 0  # steps in a row
        self._last_counters: dict[str, int] = {}  # in the log

    def _begin(self) -> None:
        """Meets the state of now, if nothing keeps the model eager."""
        if self.refusal is None:
            self.dispatcher.check()
            if self._config.mode == "graph":
                self.changes.begin()

    def _find_refusal(self) -> Refusal | None:
        captures = self.captures
        if failure := self.entries.failure:
            return Refusal(sentence=failure)
        why_eager = captures.plan.why_eager
        return refusal_of(captures.model, captures.ddp(), captures.scopes, self._config, why_eager)

    def _look_for_refusal(self) -> None:
        """Before a step, in a state that is not accepted: what one rank has to refuse by now all do."""
        captures, own, before = self.captures, self._find_refusal(), self.refusal
        self._refuse(next(filter(None, (own, *self.peers.gather(own))), None))
        if (self.refusal is None) != (before is None):
            captures.reset()
            if before is not None:  # what calls show was not looked at
                self.entries.find_doors(captures.model)
            self._begin()
        elif self.refusal is None:
            self.changes.accept_state()
        self._asked_in = captures.watch.whole_state(), self.entries.block

    def _refuse(self, refusal: Refusal | None) -> None:
        """Keeps the whole model eager, and says so in the log and in the report.

        Forwards of a host may hand frequencies of each token to its RoPE, which a call shows.
        """
        may_be_by_token = self.dispatcher.is_by_token or not self.entries.are_megatrons
        if refusal is not None and refusal.unless_by_token and may_be_by_token:
            self.entries.awaited = "" if self.dispatcher.is_by_token else refusal.sentence
            refusal = None
        is_known, self.refusal = refusal == self.refusal, refusal
        self.dispatcher.refuse(None if refusal is None else refusal.reason)
        if refusal is not None and not is_known:
            self.context.refuse(refusal.sentence)
            self.verifier.forget_except(())
            log.warning(str(refusal))

    def look_at_table(self, table: Any, params: Any, hidden_states: Tensor | None) -> None:
        """Notes whose rotary table layers are handed, and if it shows that it has a row for each token."""
        if self.unlearned is not None and not self.unlearned.take_freqs(table):
            self.unlearned = None
        if params is None or hidden_states is None:
            return
        if self.tensor.shards_sequence and self.refusal is None:
            self._arguments.include(table, params, hidden_states)
        tokens, awaited = self.tensor.num_tokens(hidden_states), self.entries.awaited
        is_by_token = self.dispatcher.look_for_freqs(table, params, tokens)
        if is_by_token:
            self.entries.awaited = ""
        elif awaited and is_by_token is False:
            self.entries.fail(awaited)

    def _has_constants(self, batch: MicroBatch) -> bool:
        """Whether it is known what an overridden model's layers will be called with."""
        if self._row is None:
            return False
        assert batch.capacity is not None
        if batch.key in self._arguments:
            return True
        rows = self.tensor.rows(batch.capacity.tokens)
        hidden = self._row.new_empty((rows, *self._row.shape))
        try:
            self._arguments.of(batch.key, batch.canonical_params(), hidden)
        except Exception as error:  # raised by a forward that we know nothing of
            what = "what its forward hands to the layers depends on more than the pack's capacity"
            self.entries.fail(f"{what} ({type(error).__name__}: {error})")
            return False
        return True

    def decide(
        self,
        model: Any,
        given: dict[str, Any],
        params: Any,  # the pack, with the ranks that share it
        tokens: int,
        why: EagerReason | None,  # it runs eager, if that is known already
        *,
        may_capture: bool,
    ) -> MicroBatch | EagerReason:
        """Decides on the micro-batch that a model is `given`; captures first, if that is due inside a step.

        Puts the capacity's constants into the pack that is given, and adds rows where the model is entered.
        The offsets stay as given: what lies behind the layers tells documents apart by them. Losses of rows
        that are added are cut off, so that no gradient comes from them. Returns the micro-batch, or why it
        runs as given after all: there is no capacity yet, it is not known what the layers will get, something
        fits the rows that were given alone, or asks the block for other results.
        """
        dispatcher, entries, ranks = self.dispatcher, self.entries, self.tensor
        self.unlearned = None
        if why is not None:
            return why
        # Layers get as many of its rows as they have of hidden states.
        from_ids = getattr(model, "pre_process", True) and given.get("decoder_input") is None
        is_shared = not ranks.shards_sequence or (ranks.is_gpt and from_ids)
        mask = given.get("padding_mask")
        entered = params, tokens, mask, is_shared, entries.are_megatrons, entries.are_settled
        batch = dispatcher.enter(*entered)
        if isinstance(batch, MicroBatch) and not batch.is_ready:
            if batch.capacity is None:
                self.unlearned = batch
                return EagerReason.WARMING_UP
            if may_capture and self.running is None and self._capture_inside():
                batch = dispatcher.enter(*entered)
        if isinstance(batch, EagerReason):
            return batch
        processor, is_foreign = given.get("output_processor"), not entries.are_megatrons
        if is_foreign and not self._has_constants(batch):
            return EagerReason.WARMING_UP
        if given.get("attention_mask") is not None or given.get("extra_block_kwargs") is not None:
            return EagerReason.SIGNATURE_CHANGED
        if batch.entry_padding:
            # Of a pipeline's stage other stages see the rows, too.
            is_inner = self.hands_on or not getattr(model, "pre_process", True)
            if is_inner or is_foreign or (processor is not None and batch.tokens % ranks.size):
                return EagerReason.SIGNATURE_CHANGED
            # They stay, and whose rotary tables its layers get shows further in: a host's are for the rows
            # given. Rows of padding reach no expert: layers of experts never get a pack to find out with.
            are_own = self._arguments.are_own
            if not (batch.key.by_token or has_experts(model.config) or are_own):
                reason = EagerReason.WARMING_UP if are_own is None else EagerReason.SIGNATURE_CHANGED
                if not batch.as_given(reason):
                    return reason
        as_given = {} if processor is None else dict(given)
        batch.enter(given, _ROW_LISTS)
        if batch.entry_padding and (rows := given.get("decoder_input")) is not None:
            if not rows.requires_grad:
                # The way back is a collective, and another rank may have a use for it.
                rows = rows.detach().requires_grad_(torch.is_grad_enabled())
            given["decoder_input"] = ranks.share_anew(rows, batch.tokens + batch.entry_padding)
        if processor is not None and not is_foreign:  # whose call of it is its own
            given["output_processor"] = _of_given_rows(batch, ranks, as_given, dict(given))
        return batch

    def count_as_given(self, reason: EagerReason, hidden_states: Tensor | None = None) -> None:
        """Counts a micro-batch that no capacity holds, or none yet, or that cannot be acted on."""
        if hidden_states is not None and reason in self.learns_from:
            self._row = hidden_states.new_empty(hidden_states.shape[1:], device="meta")
            self.learns_from = _CAPTURED_LATER
            if self.unlearned is not None:
                self.verifier.keep(self.unlearned, hidden_states)
        self.unlearned = None
        self.dispatcher.count_eager(reason)

    def watch_backward(self, out: Any, reason: EagerReason) -> None:
        """Of a call that runs eager for a reason, and returns `out` of its block: others may share it."""
        captures = self.captures
        if isinstance(out, Tensor) and captures.ddp() is not None:
            is_before_graphs = reason is EagerReason.WARMING_UP  # else their backwards notice it, if any do
            captures.bank.watch_backward(out, captures.graphed_params() if is_before_graphs else [])

    def begin(self, batch: MicroBatch, hidden_states: Tensor, table: Any, mask: Any) -> int | None:
        """Leases a slot for a micro-batch and returns the variant whose graphs replay it; None runs it eager.

        Counts an eager micro-batch; the dispatcher ends one that replays. The block was given the hidden
        states, a rotary table and, if it is Megatron's, a padding mask.
        """
        own_mask = mask if self.entries.are_megatrons else None
        arguments = self._arguments
        if not self.dispatcher.take(batch, hidden_states, table, own_mask):
            return None
        if batch.key.by_token:
            arguments.staged.set("rotary_pos_emb", table)
        variant = self.dispatcher.begin(batch)
        if variant is not None:
            if self.verifier.every:
                self.verifier.keep_replayed(batch, hidden_states)
            return variant
        assert batch.reason is not None
        self._row = hidden_states.new_empty(hidden_states.shape[1:], device="meta")
        self.learns_from = _CAPTURED_LATER
        # Nothing was captured for it, or in the settings of now.
        is_new = batch.key.kind not in self._due.captured or batch.reason is EagerReason.NUMERICS_CHANGED
        if is_new:
            self.verifier.keep(batch, hidden_states)
        if not (batch.key.by_token or batch.is_own(table, hidden_states)):
            batch.run_as_given(is_own_table=False)
            self.look_at_table(table, batch.constant_params(), hidden_states)
        self.dispatcher.count_eager(batch.reason)
        return None

    def look_around(self, models: Sequence[nn.Module]) -> None:
        """Before a step: finds the DDP around it in `models` of a schedule, and where to act by now.

        A DDP is unknown to a forward before its step, and graphs that knew of none are dropped.
        """
        model: Any = self.model()
        if model is None:
            return
        captures, entries = self.captures, self.entries
        if not _C.has_forwards(model, entries.model.forward, entries.block.forward):
            entries.find_doors(model)
        if not _C.has_layers(model):
            entries.fail(_HAS_NO_LAYERS)
        elif self.refusal is not None:  # a host may have taken back what has kept the model eager
            if self.refusal.sentence == _HAS_NO_LAYERS:
                entries.find_doors(model)
            has_changed = captures.what_changed() is not None
            is_new = (captures.watch.whole_state(), entries.block) != self._asked_in
            if self.peers.max_over_ranks([int(has_changed or is_new)]) != [0]:
                self._look_for_refusal()
        if captures.ddp() is None and (ddp := find_ddp(models, model)) is not None:
            captures.ddp = weakly(ddp)
            captures.failures.clear()  # of its hooks, which nobody expected
            captures.reset()
            if self.refusal is None:
                self._refuse(self._find_refusal())

    def _settle_entries(self) -> None:
        """Says what overrides Megatron's forwards, and refuses the model where that cannot be served.

        What one rank cannot serve all refuse; and where one has to see a call first, all run as given.
        """
        entries = self.entries
        if self.dispatcher.needs_equal_rows and not entries.are_megatrons:
            entries.fail(_NEEDS_MEGATRONS)
        entries.settle()
        if entries.are_settled and not entries.are_megatrons:
            self.context.refuse("a forward that overrides Megatron's")
        if self.refusal is not None:
            return
        said = bool(entries.failure), not entries.are_settled
        fails, waits = self.peers.max_over_ranks([*map(int, said)])
        entries.are_settled = not waits
        if fails:
            self._look_for_refusal()

    def _capture_inside(self) -> bool:
        """Inside a step, before a call that is due: captures what no step begins with. Whether it has tried.

        If slots are free, and only the state is other than at the last capture. csrc/python/dispatcher.h,
        Note [Dispatch], says when a call is due.
        """
        from megatron.core.transformer.cuda_graphs import is_graph_capturing

        captures, watch = self.captures, self.captures.watch
        if is_graph_capturing() or captures.bank.holders():
            return False
        is_same = watch.is_as_expected() and not captures.are_kept_out_otherwise()
        if watch.is_watching and not is_same:
            return False
        self.at_step_boundary()
        return True

    def at_step_boundary(self, *, captures: bool = True) -> None:
        """Before a step: learns capacities, looks for what changed, captures what is due, if it `captures`.

        What changed costs one eager step; the next boundary captures again. Moved memory costs none after
        `resume()`, nor when it has moved before. What has no memory now, or is in other modes, waits.
        """
        token = subject.set(self.name)  # `about()`, without its calls: this is paid in each bare call
        try:
            entries, bank = self.entries, self.captures.bank
            if shared := bank.shared_gradients():
                entries.fail(f"{shared} are not supported yet")
            if entries.news or not entries.are_settled or self.peers.size > 1:
                self._settle_entries()
            if captures and self.context.is_dynamic:
                self.context.follow()
                self.dispatcher.set_groups(self.context.by_size())
            if self.refusal is not None:
                return
            if captures and not self.dispatcher.has_capacities:
                self.dispatcher.learn(self._learners.max_over_ranks)
            if self._config.mode != "graph":
                return
            changes = self.changes
            runs_eager = _C.is_skipped() or changes.is_suspended
            if changes.look(runs_eager=runs_eager, captures=captures):
                self._look_for_refusal()
            if runs_eager or not captures or self.refusal is not None:
                return
            changes.has_resumed = False
            if changes.reason is not None:
                return
            dispatcher, bank = self.dispatcher, self.captures.bank  # another one if graphs were dropped
            # Somebody's hooks of saved tensors, or modes, would be part of the capture, or look into it.
            against = bank.reason_before_step(training=True, look_at_grads=False)
            under = "anomaly detection" if torch.is_anomaly_enabled() else against and against.name
            under = under or ("parametrize.cached()" if nn.utils.parametrize._cache_enabled else None)
            if self.verifier.pending:
                has_gradients = changes.gradients_reason is None
                if not self.captures.is_still_right(may_run=not under, has_gradients=has_gradients):
                    return
            may_wait = self._due.captured or torch.is_inference_mode_enabled()
            is_kept_back = under and self._due.due and not may_wait
            self._kept_back = self._kept_back + 1 if is_kept_back else 0
            if self._kept_back == PATIENCE:
                self.captures.note(f"{_KEPT_BACK}: each step begins under {under}")
            has_freqs = not dispatcher.is_by_token or dispatcher.freqs is not None
            can_capture = not under and has_freqs and self._row is not None and dispatcher.has_capacities
            if (self._due.due or self.peers.size > 1) and (kinds := changes.due_anywhere(can_capture)):
                self._capture(kinds)
        finally:
            subject.reset(token)

    @property
    def may_replay_training(self) -> bool:
        """Whether there are training graphs, and nothing keeps them from the step that begins."""
        changes = self.changes
        is_eager = changes.is_suspended or changes.reason is not None or changes.gradients_reason is not None
        return not is_eager and any(kind.grad for kind in self._due.captured)

    def _capture(self, kinds: set[VariantKey]) -> None:
        assert self._row is not None
        self.captures.failures[:] = (it for it in self.captures.failures if not it.startswith(_KEPT_BACK))
        self.changes.make_room()
        self.captures.capture(self.captures.prepared(self.dispatcher.variants(kinds), self._row))
        # Nor has a bank captured any whose place this one has just taken.
        self.changes.follow_capture(is_first=not self._due.captured)
        self._due.mark_captured(kinds)  # or they stay eager; what was captured before is due again
        self.verifier.forget_except(self._due.due)

    def break_step(self) -> None:
        """After a step that raised: what it may have left is freed before the next one."""
        self.changes.has_raised = True
        if self.end_plan is not None:
            self.end_plan()
        self.captures.forget_unfinished()
        self.after_step()

    def after_step(self) -> None:
        """After a step: remembers which kinds of micro-batches it held.

        Raises `RuntimeError` if a backward was never finished.
        """
        bank = self.captures.bank
        if unfinished := bank.take_unfinished():
            raise RuntimeError(unfinished)
        for kind in self._due.end_step():
            with about(self.name):
                log.warning(
                    "micro-batches %s gradients stay eager in steps that begin in another state: layers are "
                    "captured while no micro-batch is in flight, in the state they have then (train() or "
                    "eval(), adapters, hooks)",
                    "with" if kind.grad else "without",
                )

    def after_training_step(self) -> None:
        """Counts it, and now and then says what was replayed since it last did, and what is guarded."""
        self._training_steps += 1
        interval = self._config.log_interval
        if not interval or self._training_steps % interval:
            return
        bank = self.captures.bank
        now = bank.counters()
        since = {name: count - self._last_counters.get(name, 0) for name, count in now.items()}
        self._last_counters = now
        eager = {reason.name: since[reason.name] for reason in EagerReason if since[reason.name]}
        reasons = ", ".join(f"{name} {count}" for name, count in eager.items())
        log.info(
            "steps %d-%d: %s: %d of %d layer calls replayed, %d eager%s; %s; %s",
            *(self._training_steps - interval + 1, self._training_steps, self.name),
            *(since["replays"], since["calls"], sum(eager.values()), f" ({reasons})" if reasons else ""),
            *(self.changes.describe(), self.verifier.describe(bank)),
        )
        misfits = sum(since[reason.name] for reason in _MISFITS)
        if misfits > _MOST_MISFITS * since["calls"] and not self._has_told_of_misfits:
            self._has_told_of_misfits = True
            log.warning(
                "%s: %.0f %% of layer calls of steps %d-%d ran eager, since no capacity holds their packs "
                "(%s at most): set max_seqlen_per_dp_cp_rank and cuda_graph_max_packed_seqs",
                *(self.name, 100 * misfits / since["calls"]),
                *(self._training_steps - interval + 1, self._training_steps, self.dispatcher.most_needed),
            )

    def report(self) -> dict[str, Any]:
        """Counters, padding and captures as plain values. Waits for the device."""
        captures, bank = self.captures, self.captures.bank
        counters, by_size = bank.counters(), self.dispatcher.counts() if self.context.is_dynamic else {}
        valid, replayed = int(captures.valid_tokens.item()), self.dispatcher.replayed_tokens
        refused = [] if self.refusal is None else [f"{self.name} {self.refusal}"]
        needed = self.dispatcher.most_needed
        return {
            "model": self.name,
            "calls": counters["calls"],
            "replays": counters["replays"],
            "eager": {reason.name: counters[reason.name] for reason in EagerReason if counters[reason.name]},
            "capacities": self.dispatcher.report(),
            "most_needed": None if needed is None else needed.as_dict(),
            "cp_sizes": {str(size): counts for size, counts in by_size.items()},
            "replayed_rows": replayed,
            "padding_share": 1 - valid / replayed if replayed else None,
            "cuda_graph_modules": [*captures.scopes],
            "layers": sum(spec.calls for spec in captures.specs),
            "sites": len(bank.specs),
            "graphs": bank.num_graphs,
            "slots": bank.num_slots,
            "most_in_flight": bank.most_in_flight,
            "pool_bytes": bank.pool_bytes(),
            "capture_seconds": bank.capture_seconds,
            "verification": self.verifier.report(bank),
            **self.changes.report(),
            "failures": [*refused, *captures.failures],
        }


def _of_given_rows(
    batch: MicroBatch, ranks: TensorRanks, as_given: Mapping[str, Any], passed: Mapping[str, Any]
) -> Callable[..., Any]:
    """An output processor that hands the caller's own what it would be handed without us.

    What that returns is of the rows that were given, whatever it is. What the model has made of what it was
    `passed` stays what it is, less the rows that were added.
    """
    tokens, has_more = batch.tokens, bool(batch.entry_padding)

    def process(**handed: Any) -> Any:
        if has_more:
            handed["hidden_states"] = ranks.share_anew(handed["hidden_states"], tokens)
        for name in (name for name in _HANDED_ON if handed.get(name) is not None):
            if handed[name] is passed.get(name):
                handed[name] = as_given.get(name)
            elif has_more and name == "decoder_input":  # the embedding's, for one
                handed[name] = ranks.share_anew(handed[name], tokens)
            elif has_more and name in _ROW_LISTS:
                handed[name] = handed[name][:, :tokens]
        return as_given["output_processor"](**handed)

    return process
