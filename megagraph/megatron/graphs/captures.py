# SPDX-License-Identifier: Apache-2.0
"""How the graphs of one model come and go: finds its sites, captures and verifies variants, begins anew.

Does not decide which micro-batch replays, nor when to capture.

Note [Joining]
With `cuda_graph_granularity="chunk"` neighbouring whole layers are one site, with one graph for each pass.
They are joined before the first capture of a bank, as far as each can be graphed, and up to where a bucket of
gradients ends that is reduced in the backward pass, or gathered in the forward pass.
A site of several layers that cannot be captured, or is wrong, says nothing of the layer at fault. So its
layers are captured again one by one, which names those at fault; these stay eager, and what is left is joined
once more. Where no layer fails by itself they stay apart.
"""

import contextlib
import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph._C import VariantKey
from megagraph.bank.bank import Bank
from megagraph.bank.capture import GAVE_UP, BankOptions, GroupGaveUp
from megagraph.bank.sites import SiteSpec, VariantSpec, ineligible_sites
from megagraph.config import GraphConfig
from megagraph.log import log
from megagraph.megatron.graphs.dispatcher import Dispatcher
from megagraph.megatron.graphs.layer_arguments import LayerArguments, MlaTables
from megagraph.megatron.graphs.refusals import scopes_of
from megagraph.megatron.graphs.verifying import Verifier, found_anywhere
from megagraph.megatron.parallel.ddp import ParamSyncs, accumulator_hooks, borders_of, is_ddp_hook, listen
from megagraph.megatron.parallel.groups import refused_for_groups
from megagraph.megatron.parallel.model_parallel import has_experts, schedule_of, slots_of
from megagraph.megatron.parallel.peers import Peers
from megagraph.megatron.scopes.moe import make_scale
from megagraph.megatron.scopes.parts import delaying
from megagraph.megatron.scopes.plan import BlockPlan, LayerStep
from megagraph.megatron.seams import PACKED_SEQ_PARAMS, RNG_TRACKER, called_name, moe_metrics, stand_in
from megagraph.megatron.watch import IGNORED_ATTRIBUTES, LayerWatch, keys_of, weakly
from megagraph.reasons import EagerReason, Why
from megagraph.report import capture_progress

__all__ = ["Captures", "capturing", "step_kept"]


def _noting_reads(kind: type[Any], of_hosts: Collection[str], noted: set[str]) -> type[Any]:
    """The class of a pack of graphs, from which it is an error to read what hosts put on theirs."""

    def read(it: Any, name: str) -> Any:
        if name in of_hosts:
            raise ValueError(f"reads `{name}`, which the host has put on its packs, and no graph hears of")
        noted.add(name)
        return object.__getattribute__(it, name)

    return type(kind.__name__, (kind,), {"__getattribute__": read})


class Captures:
    """The graphs of one model's layers, what they rely on, and the bank that holds them."""

    plan: BlockPlan  # the steps of the layers, of which several whole ones may be joined
    # By the index of a variant in the bank: the plan's steps, by layer, and what layers are called with.
    steps: Mapping[int, Mapping[int, Sequence[LayerStep]]]
    constants: Mapping[int, _C.Constants]

    def __init__(
        self,
        model: nn.Module,
        ddp: nn.Module | None,
        config: GraphConfig,
        peers: Peers,
        arguments: LayerArguments,
        dispatcher: Dispatcher,
    ) -> None:
        self._model = weakref.ref(model)
        self.ddp = weakly(ddp)  # Megatron's DDP around the model, as far as it is known and alive
        self._config, self._peers, self._entries = config, peers, arguments.entries
        self._tensor, self._context = peers.tensor, peers.context
        self.dispatcher, self._due = dispatcher, dispatcher.due
        self.arguments = arguments  # what layers are called with, by variant
        # What of each layer is graphed; none for whole layers.
        self.scopes = scopes_of(model, config.cuda_graph_modules)
        self._apart: set[int] = set()  # layers whose site of several has failed
        # By name those whose graph was wrong, or that were at fault for one of several. No other is made:
        # what is captured after memory has moved may have no micro-batch to be compared on.
        self._wrong: dict[str, Why] = {}
        self._has_said_why_apart = False
        # As the bank was captured: sites that could not be graphed here, by index, and those of them that
        # must be in no graph for what may be another thing at the next capture.
        self._ineligible: Mapping[int, Why] = {}
        self._kept_out: Mapping[int, Why] = {}
        self._seen: list[object] = []  # the layers at the last look at them, and whether plans run them
        self.follow()
        self.device = next(model.parameters()).device
        # Of all replayed packs.
        self.valid_tokens = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._mla_tables = MlaTables()
        self.verifier = Verifier(config, peers)
        self.failures: list[str] = []  # what stays eager, in words
        self._last_holders = ""
        self._progress = capture_progress() if config.progress else None
        self._begin(former=None)

    @property
    def model(self) -> Any:
        """The model, which lives as long as somebody calls it."""
        model = self._model()
        assert model is not None
        return model

    @property
    def specs(self) -> Sequence[SiteSpec]:
        """The sites of the layers."""
        return self.plan.specs

    def _begin(self, former: Bank | None, stay_eager: Collection[int] = ()) -> None:
        """Begins a bank, whose counters go on from those of another one, and watches what it relies on."""
        reference, model, plan, config = self._model, self.model, self.plan, self._config
        self.watch = LayerWatch(
            self.specs,
            model.decoder,
            keys=lambda: [*keys_of(live), *plan.keys()] if (live := reference()) is not None else [],
            is_expected_hook=is_ddp_hook,
            stay_eager=stay_eager,
        )
        self._param_syncs = ParamSyncs(self.ddp(), self.specs)
        # Asked in each forward for what to call before a site, with its index; None if nothing ever is.
        self.before_sites = self._param_syncs.before_sites if self._param_syncs.groups else None
        slots, schedule = slots_of(model, config.cuda_graph_slots), schedule_of(model)
        # Two share memory if a forward runs beside the backward of the same chunk.
        do_face = schedule.stages == 1 and slots == 2 and schedule.has_expert_overlap
        facing, share_given_back = plan.facing() if do_face else ((), False)
        options = BankOptions(
            max_over_ranks=self._peers.max_over_ranks,
            run_eager_alike=self._peers.run_eager_alike if self._peers.size > 1 else None,
            tracker=RNG_TRACKER.function(),
            guard=capturing,
            left_out=IGNORED_ATTRIBUTES,
            facing=facing,
            share_given_back=share_given_back,
            poison=config.poison,
            annotate=config.cuda_graph_nvtx,
        )
        steps = [step.step for step in plan.steps]
        self.bank = Bank(steps, self.device, num_slots=slots, options=options, former=former)
        self._dispatch()

    def _dispatch(self) -> None:
        """Has micro-batches begin on the graphs of now."""
        bank = self.bank
        self.steps = {index: self.plan.walk(variant.sites) for index, variant in bank.captured.items()}
        self.constants = {index: self.arguments[key] for key, index in bank.variants.items()}
        self.arguments.captured = bank.variants
        self._mla_tables.keep(bank.variants)
        self.dispatcher.use(bank, bank.variants, bank.eager_variants, self.watch)

    # -- capture ---------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether nobody holds a slot, so that a capture may begin; says who does otherwise."""
        holders = self.bank.holders()
        if holders and holders != self._last_holders:  # once, and not in each step
            log.warning("capture waits: %s", holders)
        self._last_holders = holders
        return not holders

    def prepared(self, keys: Sequence[VariantKey], row: Tensor) -> list[VariantSpec]:
        """Variants of rows such as this one, to be captured at once: settles which layers stay eager."""
        if self.watch.is_watching and self.are_kept_out_otherwise():
            self.reset()
        self._prepare()
        self._context.warm_up(self.device)
        return [self._variant(key, row) for key in keys]

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
        self._dispatch()
        listen(self.bank, self.ddp())
        shapes = "; ".join(dict.fromkeys(str(variant.key.capacity) for variant in variants))
        seconds = self.bank.capture_seconds - seconds
        log.info("captured %d graphs in %.2f s for %s", self.bank.num_graphs, seconds, shapes)

    def _capture_and_verify(self, variants: Sequence[VariantSpec]) -> None:
        """Captures, and again without the layers whose graphs turn out to be wrong, or with others joined."""
        keys = [variant.key for variant in variants]
        while True:
            self.bank.capture(variants, self._progress)
            sealed = sorted(map(repr, self.bank.variants)), sorted(self.bank.eager_sites)
            if self._peers.max_over_ranks([0]) != [0] or not self._peers.agree_on(repr(sealed)):
                raise GroupGaveUp
            failing: Mapping[int, Why] = {it.index: (it.reason, it.detail) for it in self.bank.failures}
            if not self._are_to_join_otherwise(failing):
                failing = self._find_failing(keys)
                if not failing:
                    return
                if not self._are_to_join_otherwise(failing):
                    self._leave_eager(failing)
                    self.bank.drop(keys)
                    continue
            self.reset()
            self._prepare()

    def _find_failing(self, keys: Sequence[VariantKey]) -> Mapping[int, Why]:
        with self._param_syncs.held_back():
            failing = self.verifier.failing(self.bank, keys)
        while self.bank.holders() and gc.collect():  # what ran beside the graphs left cycles, as dynamo does
            pass
        self._keep_out(failing)
        return failing

    def is_still_right(self, *, may_run: bool, has_gradients: bool) -> bool:
        """Verifies what has been due longest in this state; drops every graph if that of a layer is wrong.

        It waits where nothing `may_run` beside what is in force, or gradients have no memory.
        """
        pending, states = self.verifier.pending, self.dispatcher.states
        if not (places := [it for it in pending if it[0] == states.current]):
            return True
        has_gradients = has_gradients and self.watch.has_memory(grad=True)
        own = [int(not may_run or (grad and not has_gradients)) for _, grad in places]
        able = [it for it, waits in zip(places, self._peers.max_over_ranks(own), strict=True) if not waits]
        if not able or (key := pending.pop(able[0])) not in self.bank.variants:
            return True
        failing = self._find_failing([key])
        if self._are_to_join_otherwise(failing):
            self.reset()
        elif failing:
            self._leave_eager(failing)
            self.drop([*self.bank.variants])
            self._due.forget_graphs()
        else:
            self.verifier.forget_except(self._due.due, pending.values())
        return not failing

    def _prepare(self) -> None:
        """Before a capture; the first one of a bank settles which layers are joined, and which stay eager."""
        if not self.watch.is_watching:
            self._join()
            if not self._has_sites_of_now():
                self.reset()
            self.watch.expect_hooks()
            self.watch.follow_modules()
            self._leave_eager(self._ineligible_in_group())
            for sentence in self.plan.notes:
                self.note(sentence)
        self._peers.hold(self.specs)

    def _has_sites_of_now(self) -> bool:
        """Whether the bank is of the sites that the layers have now."""
        return [*self.bank.specs] == [*self.specs]

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

    def _variant(self, key: VariantKey, row: Tensor) -> VariantSpec:
        """What the block is captured for; csrc/python/variant_layout.h says which buffers there are."""
        model, dispatcher, tail, capacity = self.model, self.dispatcher, self._config.tail, key.capacity
        assert capacity is not None
        rows = self._tensor.rows(capacity.tokens)
        hidden = row.new_empty((rows, *row.shape))
        params_type: Any = dispatcher.params_type or PACKED_SEQ_PARAMS.function()
        noting = _noting_reads(params_type, dispatcher.host_names, dispatcher.read_names)
        freqs = dispatcher.freqs if key.by_token else None  # of each token, without rows
        packs, config = _C.CanonicalPacks(key, tail.extra_seqs), model.config
        layout = packs.layout(
            rows=rows, valid_tokens=self.valid_tokens, freqs=freqs, masks_tail=has_experts(config)
        )

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            live = self.model  # looked up each time: variants must not keep it alive
            kept, tables = step_kept(live.decoder), self._mla_tables.answering(live.decoder, key)
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
            params.__class__ = noting  # the model itself, asked for these arguments, may read what it likes
            if staged := tuple(it for name, it in own.items() if name.startswith("rotary_pos_emb.")):
                given["rotary_pos_emb"] = staged if isinstance(freqs, tuple) else staged[0]
            if mask is not None:
                given["padding_mask"] = mask.view(1, rows)
            return given

        mode = "training" if model.decoder.training else "evaluation"
        # What sets its graphs apart from those of plain training packs.
        apart = "" if key.grad else "forward only", "with a padding mask" if key.has_mask else ""
        return VariantSpec(
            key=key,
            name=", ".join(filter(None, (mode, *apart, str(capacity)))),
            training=key.grad,
            rows=rows,
            row_shape=row.shape,
            dtype=row.dtype,
            metadata=dict(layout.metadata),
            end_source=layout.end_source,
            end_buffer=layout.end_buffer,
            fewer_rows=layout.is_whole,
            arguments=arguments,
            context=context,
        )

    # -- which stay eager ------------------------------------------------------------------------

    def _find_ineligible(self) -> Mapping[int, Why]:
        """Those that no graph can replace, by index: the reason, and what was found."""
        modules = {*self.model.modules()} - {module for spec in self.specs for module in spec.modules()}
        outside = [param for module in modules for param in module.parameters(recurse=False)]
        found = ineligible_sites(
            self.specs,
            other_params=outside,
            is_expected_hook=is_ddp_hook,
            accumulator_hooks=accumulator_hooks(self.ddp()),
        )
        return {**found, **self._kept_out_now(), **self.plan.refused}

    def _kept_out_now(self) -> Mapping[int, Why]:
        awaited = {  # their late gradients, by somebody but DDP
            index: (EagerReason.FOREIGN_HOOK, f"hook {called_name(hook)} on gradients that come late")
            for index, spec in enumerate(self.specs)
            for module in (delaying(spec.modules()) if spec.finish is not None else ())
            for hook in getattr(module, "wgrad_accumulation_and_reduce_hooks", ())
            if not is_ddp_hook(hook)
        }
        refused = refused_for_groups(self.specs, self._peers.same_pack(), self.model)
        return {**self.plan.no_longer_graphed(), **awaited, **refused}

    def _ineligible_in_group(self) -> Mapping[int, Why]:
        """Those that some rank of the group cannot graph, or has found to be at fault before."""
        self._ineligible, self._kept_out = self._find_ineligible(), self._kept_out_now()
        named = enumerate(spec.name for spec in self.specs)
        wrong = {index: self._wrong[name] for index, name in named if name in self._wrong}
        elsewhere = "another rank of the group cannot graph it"
        return found_anywhere(self._peers, {**self._ineligible, **wrong}, len(self.specs), elsewhere)

    def graphed_params(self) -> list[list[nn.Parameter]]:
        """Of each site that may get graphs those whose gradients these would add."""
        if any(spec.is_gone for spec in self.specs):
            return []
        out = self._find_ineligible()
        sites = (spec for index, spec in enumerate(self.specs) if index not in out)
        return [[param for _name, param in site.trainable()] for site in sites]

    def are_kept_out_otherwise(self) -> bool:
        """Whether other layers than before the first capture must be in no graph, here or on another rank."""
        return self._peers.max_over_ranks([int(self._kept_out_now() != self._kept_out)]) != [0]

    # -- which are joined ------------------------------------------------------------------------

    def _join(self) -> None:
        """Before the first capture of a bank: joins neighbouring whole layers, if so configured."""
        if self._config.cuda_graph_granularity != "chunk":
            return
        self.plan = self._each
        left = self._ineligible_in_group()
        # A rank that has got another layer has forgotten what it found about the one before.
        num_sites = len(self.specs)  # while none are joined
        anywhere = self._peers.max_over_ranks([int(place in self._apart) for place in range(num_sites)])
        self._apart = {place for place, is_apart in enumerate(anywhere) if is_apart}
        if self._entries.are_megatrons:
            borders = borders_of(self.ddp(), self.specs)
            joined = self._each.joined(borders, {*left, *self._apart})
            if len(joined.specs) < num_sites:
                self.plan = joined
        if self.plan is self._each and num_sites > 1 and not self._has_said_why_apart:
            self._has_said_why_apart = True
            log.warning("cuda_graph_granularity='chunk' joins no layers: %s", self._why_apart())

    def _why_apart(self) -> str:
        if not self._entries.are_megatrons:
            return "a forward that overrides Megatron's calls them one by one"
        if all(step.parts for step in self.plan.steps):
            return "cuda_graph_modules leaves something eager in each of them"
        return "each stands by itself between buckets of gradients, or between layers that stay eager"

    def _are_to_join_otherwise(self, failed: Mapping[int, Why]) -> bool:
        """Learns which sites failed, by index, and why. Returns whether others are to be captured."""
        ends = itertools.accumulate((spec.calls for spec in self.specs), initial=0)
        places = [range(*pair) for pair in itertools.pairwise(ends)]  # that sites have while none are joined
        of_several = {place for index in failed if len(places[index]) > 1 for place in places[index]}
        at_fault = {index: why for index, why in failed.items() if places[index].start in self._apart}
        if at_fault:
            self._keep_out(at_fault)
            self._apart.clear()
        self._apart |= of_several
        return bool(of_several or at_fault)

    def _keep_out(self, wrong: Mapping[int, Why]) -> None:
        """Has sites, by index, stay eager in every capture to come, for these reasons."""
        self._wrong |= {self.specs[it].name: why for it, why in wrong.items()}

    # -- what graphs rely on ----------------------------------------------------------------------

    def follow(self) -> bool:
        """Looks at the block. Returns whether it has other sites than before, or may have graphs of more."""
        block = self.model.decoder
        now = [*map(weakref.ref, block.layers), block.config.overlap_moe_expert_parallel_comm]
        has_others = now != self._seen
        if has_others or self.plan.may_graph_more():
            self._seen = now
            self._each = self.plan = BlockPlan(block, self.scopes)
            self._apart.clear()
            if has_others:
                self._wrong.clear()
            return True
        if self.plan is not self._each and not self._entries.are_megatrons:
            self.plan = self._each
            return True
        return False

    def what_changed(self) -> EagerReason | None:
        """Why the graphs must not be replayed any more, or None."""
        self.have_only_gradients_moved = False
        if self.bank.has_other_streams() or self.bank.have_borrowed_moved():
            return EagerReason.ADDRESS_MOVED
        if self.follow():
            self.reset()
            return EagerReason.PARAMETERS_CHANGED
        if not self.watch.is_watching:
            self.watch.follow_modules()  # whose state makes a kind
            return None
        changed = self.watch.difference(self._why_of_hooks)
        self.have_only_gradients_moved = self.watch.have_only_gradients_moved
        return changed

    def _why_of_hooks(self) -> EagerReason | None:
        """If hooks have changed: why other layers cannot be graphed now. Megatron's own come and go."""
        changed = {*self._find_ineligible().items()} ^ {*self._ineligible.items()}
        return min((reason for _index, (reason, _what) in changed), default=None)

    def reset(self) -> None:
        """Releases every graph and begins another bank; the counters go on, and what was captured is due."""
        self._due.forget_graphs()
        self.bank.release()
        self._peers.let_go()
        self.arguments.clear()
        self._begin(self.bank, self.watch.stay_eager if self._has_sites_of_now() else ())

    def drop(self, keys: Sequence[VariantKey]) -> None:
        """Releases the graphs of some variants. Only if no slot is held."""
        self.bank.drop(keys)
        for key in keys:
            self.arguments.pop(key, None)
        self._dispatch()


# -- while layers are captured -----------------------------------------------------------------------


@contextlib.contextmanager
def step_kept(module: nn.Module) -> Iterator[None]:
    """Puts Transformer Engine's flag of a first micro-batch back; new metrics of experts are left empty."""
    first = "is_first_microbatch"
    flags = [(child, getattr(child, first)) for child in module.modules() if hasattr(child, first)]
    make_scale(module)
    metrics = set(moe_metrics())
    try:
        yield
    finally:
        for name, values in moe_metrics().items():
            if name not in metrics:
                values.zero_()
        for child, flag in flags:
            setattr(child, first, flag)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Tells Megatron and Transformer Engine, and leaves random streams as they are inside a stream capture.

    Megatron's flag silences its DDP's hooks, on this thread alone. Transformer Engine's is set with its own
    random streams only: its attention refuses any other tracker meanwhile, even if nothing is dropped.

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
        here = afterwards.enter_context(_C.CapturingThread())
        afterwards.enter_context(stand_in(cuda_graphs, _IS_GRAPH_CAPTURING=here))
        afterwards.enter_context(torch.autograd.set_multithreading_enabled(False))  # its backward, too
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
            swap = _outside_of_captures(getattr(owner, name), instead)
            afterwards.enter_context(stand_in(owner, **{name: swap}))
        yield


def _outside_of_captures(original: Callable[..., Any], instead: Any) -> Callable[..., Any]:
    is_inside = torch.cuda.is_current_stream_capturing
    return lambda *args, **kwargs: instead if is_inside() else original(*args, **kwargs)
