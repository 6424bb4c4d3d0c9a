# SPDX-License-Identifier: Apache-2.0
"""How the graphs of one model come and go: captures variants, verifies them, begins anew, counts.

Does not decide which micro-batch replays, nor when to capture.
"""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph._C import VariantKey
from megagraph.bank.bank import Bank
from megagraph.bank.capture import GAVE_UP, BankOptions, GroupGaveUp
from megagraph.bank.sites import VariantSpec
from megagraph.config import GraphConfig
from megagraph.decide.reasons import EagerReason, Why
from megagraph.log import log
from megagraph.megatron.graphs.dispatcher import Dispatcher
from megagraph.megatron.graphs.layer_arguments import LayerArguments, MlaTables
from megagraph.megatron.graphs.layers import BlockLayers
from megagraph.megatron.graphs.verifying import Verifier
from megagraph.megatron.graphs.walk import LayerLoop
from megagraph.megatron.parallel.ddp import ParamSyncs, listen
from megagraph.megatron.parallel.model_parallel import has_experts, schedule_of, slots_of
from megagraph.megatron.parallel.peers import Peers
from megagraph.megatron.scopes.moe import make_scale, new_metrics_are_empty
from megagraph.megatron.seams import RNG_TRACKER, stand_in
from megagraph.megatron.watch import IGNORED_ATTRIBUTES
from megagraph.report import capture_progress

__all__ = ["Captures", "capturing", "step_kept"]


class Captures:
    """The graphs of one model's layers, what they rely on, and the bank that holds them."""

    def __init__(
        self,
        layers: BlockLayers,
        peers: Peers,
        config: GraphConfig,
        arguments: LayerArguments,
        dispatcher: Dispatcher,
    ) -> None:
        self.layers, self.arguments = layers, arguments  # what layers are called with, by variant
        self._peers, self._tensor = peers, peers.tensor
        self._context = peers.context
        self._config, self._dispatcher, self._due = config, dispatcher, dispatcher.due
        self.device = next(layers.model.parameters()).device
        # Of all replayed packs.
        self.valid_tokens = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._mla_tables = MlaTables()
        self.verifier = Verifier(config, peers)
        self.failures: list[str] = []  # what stays eager, in words
        # Bytes that pools would keep, and one layer beside them.
        self.rehearsed: tuple[int, int] | None = None
        self._last_holders = ""
        self._progress = capture_progress() if config.progress else None
        self.loops: dict[int, LayerLoop] = {}  # what replays each variant, by its index in the bank
        self._begin(former=None)

    def _begin(self, former: Bank | None, stay_eager: Collection[int] = ()) -> None:
        """Begins a bank, whose counters go on from those of another one, and watches what it relies on."""
        layers = self.layers
        self.watch = layers.new_watch(stay_eager)
        self._param_syncs = ParamSyncs(layers.ddp(), layers.specs)
        slots, schedule = slots_of(layers.model, self._config.cuda_graph_slots), schedule_of(layers.model)
        # Two share memory if a forward runs beside the backward of the same chunk.
        do_face = schedule.stages == 1 and slots == 2 and schedule.has_expert_overlap
        facing, share_given_back = layers.plan.facing() if do_face else ((), False)
        options = BankOptions(
            max_over_ranks=self._peers.max_over_ranks,
            run_eager_alike=self._peers.run_eager_alike if self._peers.size > 1 else None,
            tracker=RNG_TRACKER.function(),
            guard=capturing,
            left_out=IGNORED_ATTRIBUTES,
            facing=facing,
            share_given_back=share_given_back,
            poison=self._config.poison,
            annotate=self._config.cuda_graph_nvtx,
        )
        steps = [step.step for step in layers.plan.steps]
        self.bank = Bank(steps, self.device, num_slots=slots, options=options, former=former)
        self._dispatch()

    def _dispatch(self) -> None:
        """Has micro-batches begin on the bank of now."""
        bank = self.bank
        self._dispatcher.use(bank, bank.variants, bank.eager_variants, self.watch)

    def _follow_variants(self) -> None:
        """Makes loops of variants that were captured, and lets go of those that were dropped."""
        variants, plan, syncs = self.bank.variants, self.layers.plan, self._param_syncs
        for key, index in (item for item in variants.items() if item[1] not in self.loops):
            self.loops[index] = LayerLoop(
                key, plan, self.bank, self.arguments[key], syncs.before_sites, self._dispatcher
            )
        for index in self.loops.keys() - variants.values():
            if (key := self.loops.pop(index).key) not in variants:  # else it has got other graphs
                del self.arguments[key]
        self._mla_tables.keep(variants)
        self._dispatch()

    # -- capture ---------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether nobody holds a slot, so that a capture may begin; says who does otherwise."""
        holders = self.bank.holders()
        if holders and holders != self._last_holders:  # once, and not in each step
            log.warning("capture waits: %s", holders)
        self._last_holders = holders
        return not holders

    def capture(self, variants: Sequence[VariantSpec]) -> None:
        """Captures what `prepared()` has made. A failure of a layer is logged and leaves it eager."""
        seconds = self.bank.capture_seconds
        try:
            self._capture_and_verify(variants)
        except GroupGaveUp as error:
            self._abandon(str(error), None, variants, EagerReason.GROUP_DISAGREED)
            return
        except Exception as error:
            if self._peers.size > 1 and isinstance(error, torch.OutOfMemoryError):  # in a verification
                raise
            self._peers.max_over_ranks([GAVE_UP])
            self._abandon(f"{type(error).__name__}: {error}", error, variants, EagerReason.CAPTURE_FAILED)
            return
        self.failures += [said for said in self.bank.take_failures() if said not in self.failures]
        self.watch.expect_memory(grad=any(variant.training for variant in variants))
        self._follow_variants()
        listen(self.bank, self.layers.ddp())
        shapes = "; ".join(dict.fromkeys(str(variant.key.capacity) for variant in variants))
        seconds = self.bank.capture_seconds - seconds
        log.info("captured %d graphs in %.2f s for %s", self.bank.num_graphs, seconds, shapes)

    def rehearse(self, variants: Sequence[VariantSpec]) -> None:
        """Finds out, without a graph, what `capture()` would leave eager, and what memory it would take."""
        self.rehearsed = self.bank.rehearse(variants)
        self.failures += self.bank.take_failures()

    def prepared(
        self,
        keys: Sequence[VariantKey],
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        params_type: type[Any],
    ) -> list[VariantSpec]:
        """Variants, to be captured at once: settles which layers stay eager."""
        if self.watch.is_watching and self.layers.are_kept_out_otherwise():
            self.reset()
        if not self.watch.is_watching:
            self._prepare()
        self._peers.hold(self.layers.specs)
        self._context.warm_up(self.device)
        return [self._variant(key, row_shape, dtype, params_type) for key in keys]

    def _capture_and_verify(self, variants: Sequence[VariantSpec]) -> None:
        """Captures, and again without the layers whose graphs turn out to be wrong, or with others joined."""
        keys = [variant.key for variant in variants]
        while True:
            self.bank.capture(variants, self._progress)
            sealed = sorted(map(repr, self.bank.variants)), sorted(self.bank.eager_sites)
            if self._peers.max_over_ranks([0]) != [0] or not self._peers.agree_on(repr(sealed)):
                raise GroupGaveUp
            failing: Mapping[int, Why] = {
                error.index: (error.reason, error.detail) for error in self.bank.failures
            }
            if not self.layers.are_to_join_otherwise(failing):
                failing = self._find_failing(keys)
                if not failing:
                    return
                if not self.layers.are_to_join_otherwise(failing):
                    self._leave_eager(failing)
                    self.bank.drop(keys)
                    continue
            self.reset()
            self._prepare()
            self._peers.hold(self.layers.specs)

    def _find_failing(self, keys: Sequence[VariantKey]) -> Mapping[int, Why]:
        with self._param_syncs.held_back():
            failing = self.verifier.failing(self.bank, keys)
        self.layers.keep_out(failing)
        return failing

    def is_still_right(self) -> bool:
        """Verifies a variant that is due in this state; drops every graph if that of a layer is wrong."""
        pending, states = self.verifier.pending, self._dispatcher.states
        key = pending.pop(states.current, None)
        if key is None or key not in self.bank.variants:
            return True
        failing = self._find_failing([key])
        if self.layers.are_to_join_otherwise(failing):
            self.reset()
        elif failing:
            self._leave_eager(failing)
            self.drop([*self.bank.variants])
            self._due.forget_graphs()
        return not failing

    def _prepare(self) -> None:
        """Before the first capture of a bank."""
        self.layers.join()
        if not self._has_sites_of_now():
            self.reset()
        self.watch.expect_modules(self.layers.find_ineligible())
        self._leave_eager(self.layers.ineligible_in_group())
        plan = self.layers.plan
        for sentence in plan.notes:
            self.note(sentence)

    def _has_sites_of_now(self) -> bool:
        """Whether the bank is of the sites that the layers have now."""
        return [*self.bank.specs] == [*self.layers.specs]

    def _leave_eager(self, layers: Mapping[int, Why]) -> None:
        for index, (reason, what) in layers.items():
            self.note(f"{self.bank.specs[index].name} stays eager ({reason.name}): {what}")
            self.bank.keep_eager(index, reason)

    def note(self, sentence: str) -> None:
        """Says what stays eager, and reports it; once, as banks come and go."""
        if sentence not in self.failures:
            log.warning(sentence)
            self.failures.append(sentence)

    def forget_unfinished(self) -> None:
        """Where a step has raised: nobody will ask for what its backwards have left."""
        self.bank.take_unfinished()
        for spec in self.bank.specs:
            if not spec.is_gone:
                spec.forget(spec.module)

    def _abandon(
        self, why: str, error: Exception | None, variants: Iterable[VariantSpec], reason: EagerReason
    ) -> None:
        """Drops everything; these variants stay eager, beside those that do, until something changes."""
        if why not in self.failures:
            self.failures.append(why)
            log.error("capture failed: %s; training goes on eager", why, exc_info=error)
        given_up = self.bank.eager_variants | {variant.key: reason for variant in variants}
        self.reset()
        self.bank.eager_variants = given_up
        self._due.mark_captured({key.kind for key in given_up})
        self._dispatch()

    def _variant(
        self, key: VariantKey, row_shape: tuple[int, ...], dtype: torch.dtype, params_type: type[Any]
    ) -> VariantSpec:
        """What the block is captured for; csrc/python/variant_layout.h says which buffers there are."""
        layers, tail, capacity = self.layers, self._config.tail, key.capacity
        assert capacity is not None
        rows = self._tensor.rows(capacity.tokens)
        hidden = torch.empty((rows, *row_shape), dtype=dtype, device="meta")
        freqs = self._dispatcher.freqs if key.by_token else None  # of each token, without rows
        packs, config = _C.CanonicalPacks(key, tail.extra_seqs), layers.model.config
        layout = packs.layout(
            rows=rows, valid_tokens=self.valid_tokens, freqs=freqs, masks_tail=has_experts(config)
        )

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            decoder = layers.model.decoder  # looked up each time: variants must not keep it alive
            kept, tables = step_kept(decoder), self._mla_tables.answering(decoder, key)
            with self._context.showing_size(key.cp_size), kept, tables:
                yield

        def arguments(buffers: Mapping[str, Tensor]) -> Mapping[str, Any]:
            own = {name: buffer.detach() for name, buffer in buffers.items()}  # objects of its own
            documents, mask = own.get("seq_idx"), own.get("padding_mask")
            index = None if documents is None else documents.view(1, capacity.tokens)
            params = packs.make(params_type, own["actual"], own.get("padded"), index)
            _C.mark_canonical(params, by_token=key.by_token)
            given = {"attention_mask": None, "packed_seq_params": params}
            given |= self.arguments.of(key, params, hidden).values
            if staged := tuple(it for name, it in own.items() if name.startswith("rotary_pos_emb.")):
                given["rotary_pos_emb"] = staged if isinstance(freqs, tuple) else staged[0]
            if mask is not None:
                given["padding_mask"] = mask.view(1, rows)
            return given

        mode = "training" if layers.model.decoder.training else "evaluation"
        # What sets its graphs apart from those of plain training packs.
        apart = "" if key.grad else "forward only", "with a padding mask" if key.has_mask else ""
        return VariantSpec(
            key=key,
            name=", ".join(filter(None, (mode, *apart, str(capacity)))),
            training=key.grad,
            rows=rows,
            row_shape=row_shape,
            dtype=dtype,
            metadata=dict(layout.metadata),
            end_source=layout.end_source,
            end_buffer=layout.end_buffer,
            fewer_rows=layout.is_whole,
            arguments=arguments,
            context=context,
        )

    # -- what graphs rely on ----------------------------------------------------------------------

    def what_changed(self) -> EagerReason | None:
        """Why the graphs must not be replayed any more, or None."""
        self.have_only_gradients_moved = False
        if self.bank.has_other_streams() or self.bank.have_borrowed_moved():
            return EagerReason.ADDRESS_MOVED
        if self.layers.follow():
            self.reset()
            return EagerReason.PARAMETERS_CHANGED
        changed = self.watch.what_changed(self.layers.find_ineligible)
        self.have_only_gradients_moved = self.watch.have_only_gradients_moved
        return changed

    def reset(self) -> None:
        """Releases every graph and begins another bank; the counters go on, and what was captured is due."""
        self._due.forget_graphs()
        self.bank.release()
        self._peers.let_go()
        self.arguments.clear()
        self._mla_tables.keep(())
        self.loops.clear()
        self._begin(self.bank, self.watch.stay_eager if self._has_sites_of_now() else ())

    def drop(self, keys: Sequence[VariantKey]) -> None:
        """Releases the graphs of some variants. Only if no slot is held."""
        self.bank.drop(keys)
        self._follow_variants()


# -- while layers are captured -----------------------------------------------------------------------


@contextlib.contextmanager
def step_kept(module: nn.Module) -> Iterator[None]:
    """Puts Transformer Engine's flag of a first micro-batch back; new metrics of experts are left empty."""
    first = "is_first_microbatch"
    flags = [(child, getattr(child, first)) for child in module.modules() if hasattr(child, first)]
    make_scale(module)
    try:
        with new_metrics_are_empty():
            yield
    finally:
        for child, flag in flags:
            setattr(child, first, flag)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Tells Megatron and Transformer Engine, and leaves random streams as they are inside a stream capture.

    Megatron's flag silences its DDP's hooks. Transformer Engine's is set with its own random streams only:
    its attention refuses any other tracker meanwhile, even if nothing is dropped.

    Megatron swaps the generator's state around some parts of a layer, which a capture refuses. A layer that
    draws from a swapped stream, a named one or one that recomputing sets back, was found in its warm-up and
    is not captured (megagraph/bank/rng.py); for the others, the swap is without effect.
    """
    from megatron.core.tensor_parallel import random as streams
    from megatron.core.transformer import cuda_graphs

    if cuda_graphs.is_graph_capturing():
        yield
        return
    tracker = RNG_TRACKER.function()()
    engine, engine_streams = (
        sys.modules.get(f"transformer_engine.pytorch.{name}") for name in ("graph", "distributed")
    )
    with contextlib.ExitStack() as afterwards:
        cuda_graphs._set_capture_start()
        afterwards.callback(cuda_graphs._set_capture_end)
        if engine and engine_streams and isinstance(tracker, engine_streams.CudaRNGStatesTracker):
            engine.set_capture_start()
            afterwards.callback(engine.set_capture_end)
        swaps: Sequence[tuple[Any, str, Any]] = (  # and what is handed out in place of each
            (streams.CudaRNGStatesTracker, "fork", contextlib.nullcontext()),
            (streams, "_get_all_rng_states", (None, None, None)),
            (streams, "_set_all_rng_states", None),
        )
        are_fixed = torch.cuda.is_available() and not streams.is_graph_safe_cuda_rng_tracker(tracker)
        for owner, name, instead in swaps if are_fixed else ():
            stand_in(afterwards, owner, name, _outside_of_captures(getattr(owner, name), instead))
        yield


def _outside_of_captures(original: Callable[..., Any], instead: Any) -> Callable[..., Any]:
    is_inside = torch.cuda.is_current_stream_capturing
    return lambda *args, **kwargs: instead if is_inside() else original(*args, **kwargs)
