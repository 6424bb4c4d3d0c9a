# SPDX-License-Identifier: Apache-2.0
"""The graphs of one chunk of a model and their life: warm-up, capture, sealed, released.

Generic: `nn.Module`s that map one tensor to one tensor of as many rows, one after another. Knows nothing
of Megatron, of packs, or of when to capture.

A capture has four parts: every variant is warmed up, on memory that is given back before the first graph;
with several slots, one more capture that is dropped shows what is temporary in each pass; all variants are
captured, the largest one first, since the others then live in its memory; and all that this has changed is
put back. No garbage is collected meanwhile: events and memory must not be freed on a stream that is being
captured.
"""

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.backends import Backend, Notes, PassMemories, backend_for
from megagraph.bank.capture import CapturePlan, Conditions, Guard, MaxOverRanks, alone
from megagraph.bank.edges import Saves
from megagraph.bank.restore import main_grad_of, plain_tensors
from megagraph.bank.rng import RngSources, RngTracker, TrackerSource
from megagraph.bank.sites import (
    CaptureError,
    EagerPart,
    SiteSpec,
    StepOrder,
    VariantSpec,
    arguments_of,
    tensors_in,
)
from megagraph.decide.reasons import EagerReason
from megagraph.log import log
from megagraph.timeline import Lease

__all__ = ["Bank", "BankOptions", "CapturedVariant", "Progress"]

# Called with (captured so far, captures in all, what comes next).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class BankOptions:
    """What graphs are captured under.

    Args:
        holds_collectives: they contain some, so that no rank may fall back alone.
        max_over_ranks: asks the ranks whose graphs hold the same collectives: a site that one of them cannot
            capture stays eager on all of them.
        trackers: named random streams that the model draws from; a function where a tracker may be replaced.
        guard: entered around everything that runs in a capture.
        left_out: names of attributes that calls may change: graphs do not, and the caller answers for that.
        poison: fill the boundaries of a freed slot with NaN (always on the CPU), so that whatever
            reads them too late shows.
        annotate: name each replay for profilers, as a range of torch's and as an NVTX range.
        former: a bank of as many slots whose figures go on.
    """

    holds_collectives: bool = False
    max_over_ranks: MaxOverRanks = alone
    trackers: Sequence[RngTracker | TrackerSource] = ()
    guard: Guard = contextlib.nullcontext
    left_out: Collection[str] = ()
    poison: bool = False
    annotate: bool = False
    former: "Bank | None" = None


@dataclass(frozen=True, eq=False)
class CapturedVariant:
    """What a variant was captured for, so that a call of it can run eager as its graph would.

    Args:
        spec: as it was given.
        buffers: its metadata buffers, by slot and name.
        num_graphs: forwards and backwards, in every slot.
        notes: of each slot.
    """

    spec: VariantSpec
    buffers: Sequence[Mapping[str, Tensor]]
    num_graphs: int
    notes: Sequence[Notes]

    def arguments(self, slot: int, sources: Sequence[Tensor]) -> Mapping[str, Any]:
        """The arguments of a call, over the metadata of its micro-batch in memory of their own."""
        end = None if self.spec.end_source < 0 else sources[self.spec.end_source].flatten()[-1:]
        contents = {
            name: metadata.content(self.buffers[slot][name], sources, end)
            for name, metadata in self.spec.metadata.items()
        }
        return self.spec.arguments(contents)

    def staged(self, hidden: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """The first input as staging would write it: in the captured rows, zero past the pack's end.

        Where only as many rows as were captured may be given, others stay as they are.
        """
        rows = max(self.spec.rows, hidden.shape[0]) if self.spec.fewer_rows else hidden.shape[0]
        if self.spec.end_source >= 0:
            offsets = sources[self.spec.end_source]
            out: Tensor = torch.ops.megagraph.zero_tail(hidden, offsets, rows)
            return out
        missing = rows - hidden.shape[0]
        return hidden if missing == 0 else torch.cat([hidden, hidden.new_zeros(missing, *hidden.shape[1:])])


def _cannot(hidden: Tensor) -> Any:
    return NotImplemented


@dataclass(frozen=True, kw_only=True)
class _Request:
    variant: VariantSpec
    buffers: Sequence[Mapping[str, Tensor]]  # by slot
    arguments: Sequence[Mapping[str, Any]]  # over the buffers of each slot


class Bank:
    """Sites that run one after another, and all of their graphs.

    Args:
        modules: in execution order; a plain module is called with the hidden states and the variant's
            arguments. Parts that stay eager may stand anywhere.
        device: where the model is. On the CPU the host backend stands in for graphs.
        num_slots: micro-batches that may be in flight at once.
        options: what graphs are captured under.

    Raises:
        ValueError: where no module is to be captured.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module | SiteSpec | EagerPart],
        device: torch.device | str,
        *,
        num_slots: int = 1,
        options: BankOptions = BankOptions(),
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.steps = tuple(
            SiteSpec(name=f"{index}.{type(module).__name__}", module=module)
            if isinstance(module, nn.Module)
            else module
            for index, module in enumerate(modules)
        )
        self.specs = tuple(step for step in self.steps if isinstance(step, SiteSpec))
        if not self.specs:
            what = f"{len(self.steps)} parts that stay eager" if self.steps else "none"
            raise ValueError(f"expected at least one module, got {what}")
        self.order = StepOrder.of(self.steps)
        self.rng = RngSources(device, options.trackers)
        # Whether trackers draw from other generators than the graphs, which must not be replayed then.
        self.has_other_streams = self.rng.has_other_streams
        self.backend: Backend = backend_for(device, self.rng.generators)
        self.max_over_ranks, self.holds_collectives = options.max_over_ranks, options.holds_collectives
        self._conditions = Conditions(
            backend=self.backend,
            rng=self.rng,
            guard=options.guard,
            max_over_ranks=options.max_over_ranks,
            left_out=options.left_out,
        )
        self._annotate = options.annotate
        self.core = _C.GraphBank(
            self.backend.device,
            len(self.specs),
            num_slots=num_slots,
            pools=self.backend.add_pools(num_slots),
            poison=options.poison or device.type == "cpu",
            holds_collectives=options.holds_collectives,
        )
        # Counts calls, `(reason, calls)`, that run eager without asking a site. No function of ours is around
        # it, which micro-batches that no graph can take would pay for.
        self.count_eager: Callable[[EagerReason, int], None] = self.core.count_eager
        for index, site in enumerate(self.specs):
            self.core.set_site_calls(index, site.calls)
        self.sites = tuple(self.core.site(index) for index in range(len(self.specs)))
        # All steps in one call and with one autograd node; `NotImplemented` where that cannot be.
        self.replay_all = self.core.replay_all() if len(self.specs) == len(self.steps) else _cannot
        # The graphs of each variant, by index, and what they were captured for.
        self.variants: dict[Any, int] = {}
        self.captured: dict[int, CapturedVariant] = {}
        # The running micro-batch's, for its calls that run eager.
        self._running: tuple[CapturedVariant, Sequence[Tensor]] | None = None
        # What stays eager, and why: sites by index, and variants of which no site could be captured.
        self.eager_sites: dict[int, EagerReason] = {}
        self.eager_variants: dict[Any, EagerReason] = {}
        # Of each captured site: its parameters with main_grad, as the backward pass reaches them.
        self.gradient_order: dict[int, Sequence[Tensor]] = {}
        self._listener: tuple[Callable[[], bool], Callable[[int, int], None], Sequence[int]] | None = None
        self.failures: list[CaptureError] = []
        self.capture_seconds = 0.0
        self._not_counted: Counter[str] = Counter()
        if options.former is not None:
            self.core.continue_from(options.former.core)
            self.capture_seconds = options.former.capture_seconds
            self._not_counted += options.former._not_counted

    @property
    def state(self) -> _C.BankState:
        """Where the bank is in its life."""
        return self.core.state

    @property
    def num_slots(self) -> int:
        """Micro-batches that may be in flight at once."""
        return self.core.num_slots

    @property
    def num_graphs(self) -> int:
        """Graphs of all variants, forwards and backwards, in every slot."""
        return sum(variant.num_graphs for variant in self.captured.values())

    # -- capture ---------------------------------------------------------------------------------

    def capture(self, variants: Iterable[VariantSpec], progress: Progress | None = None) -> None:
        """Captures variants and seals the bank. Call it between steps only.

        A variant that has graphs gets others. A site that cannot be captured stays eager, is logged and
        listed in `failures`; the others go on. The largest variant comes first: the smaller ones then live
        in its memory.

        Raises:
            RuntimeError: where a slot is still held, naming by whom.
            ValueError: where an argument of a variant would go stale, naming it.
        """
        if holders := self.holders():
            raise RuntimeError(f"capture needs every slot to be free; still held: {holders}")
        order = sorted(
            map(self._request, variants),
            key=lambda request: (request.variant.training, request.variant.rows),
            reverse=True,
        )
        self.rng.expect_streams()
        start = time.perf_counter()
        self.core.become(_C.BankState.CAPTURING)
        was_enabled = gc.isenabled()
        self.backend.settle()
        self.backend.collect()
        gc.disable()
        try:
            self.drop(request.variant.key for request in order)
            # Every warm-up first: beside a pool that is full already, its memory would come on top.
            saves, memories = [], []
            for request in order:
                with request.variant.context():
                    saves.append(self._warm_up(request))
            for request in order:
                with request.variant.context():
                    memories.append(self._learn_memory(request))
            self.backend.settle()
            for done, request in enumerate(order):
                if progress is not None:
                    progress(done, len(order), f"variant {request.variant}")
                with request.variant.context():
                    self._capture_one(request, saves[done], memories[done])
            if progress is not None:
                progress(len(order), len(order), "done")
        finally:
            if was_enabled:
                gc.enable()
            self.backend.settle()
            self.core.become(_C.BankState.SEALED)
            self.capture_seconds += time.perf_counter() - start

    def _plan(self, request: _Request, slot: int) -> CapturePlan:
        return CapturePlan(
            self._conditions,
            self.graphable(),
            self.order,
            request.variant,
            request.buffers[slot],
            request.arguments[slot],
        )

    def _warm_up(self, request: _Request) -> Mapping[int, Saves]:
        """Runs a variant once, and again without the site that failed."""
        while self.graphable():
            try:
                return self._plan(request, 0).warm_up()
            except CaptureError as error:
                self._give_up_site(error)
            gc.collect()  # frames of the failed attempt hold its memory in cycles
        return {}

    def _learn_memory(self, request: _Request) -> PassMemories | None:
        """Captures a variant once, and drops it, to see what each pass allocates. None of a single slot."""
        while self.num_slots > 1 and self.graphable():
            try:
                with self.backend.learning() as given:
                    if given is None:
                        return None
                    pool, memories = given
                    self._plan(request, 0).capture(pool, memories)
                return memories
            except CaptureError as error:
                self._give_up_site(error)
            gc.collect()
        return None

    def _capture_one(
        self, request: _Request, saves: Mapping[int, Saves], memories: PassMemories | None
    ) -> None:
        """Captures a variant into every slot, and again without the site that failed."""
        while self.graphable():
            try:
                plans = [self._plan(request, slot) for slot in range(self.num_slots)]
                by_slot = [plan.capture(slot, memories) for slot, plan in enumerate(plans)]
                self._add_variant(request, by_slot, saves, [plan.notes for plan in plans])
                return
            except CaptureError as error:
                self._give_up_site(error)
            gc.collect()
            memories = self._learn_memory(request)  # other sites hand on other tensors
        self.eager_variants[request.variant.key] = self.eager_sites[0]

    def _give_up_site(self, error: CaptureError) -> None:
        log.warning("stays eager (%s): %s", error.reason.name, error)
        # The traceback's frames hold tensors of the failed attempt, some of them in the slot's pool.
        error.__cause__ = error.__context__ = error.__traceback__ = None
        self.failures.append(error)
        self.keep_eager(error.index, error.reason)

    def _request(self, variant: VariantSpec) -> _Request:
        buffers = [
            {name: spec.buffer() for name, spec in variant.metadata.items()} for _ in range(self.num_slots)
        ]
        with variant.context():
            arguments = [arguments_of(variant, of_slot) for of_slot in buffers]
        return _Request(variant=variant, buffers=buffers, arguments=arguments)

    def _add_variant(
        self,
        request: _Request,
        by_slot: Sequence[Mapping[int, _C.SiteGraph]],
        saves: Mapping[int, Saves],
        notes: Sequence[Notes],
    ) -> None:
        variant = request.variant
        per_site = 2 if variant.training else 1
        index = self.core.add_variant(
            training=variant.training,
            end_source=variant.end_source,
            fewer_rows=variant.fewer_rows,
            metadata=[*variant.metadata.values()],
            buffers=[[buffers[name] for buffers in request.buffers] for name in variant.metadata],
        )
        for slot, graphs in enumerate(by_slot):
            for site, graph in graphs.items():
                graph.saves_input, graph.saves_outputs = saves[site]
                graph.reads = self._reads(self.specs[site], request, slot)
                if self._annotate:
                    graph.set_range(f"{self.specs[site].name}, {variant}, slot {slot}")
                self.core.set_graph(site, index, slot, graph)
                if graph.accumulated:
                    self.gradient_order[site] = graph.accumulated
        num_graphs = per_site * sum(map(len, by_slot))
        captured = CapturedVariant(spec=variant, buffers=request.buffers, num_graphs=num_graphs, notes=notes)
        self.variants[variant.key] = index
        self.captured[index] = captured

    def _reads(self, site: SiteSpec, request: _Request, slot: int) -> list[Tensor]:
        """What a site's graphs read beside their boundaries, to be kept as long as they live."""
        params = site.parameters()
        reads = [*params, *site.buffers(), *plain_tensors([*site.named_modules()]).values()]
        reads += [*request.buffers[slot].values(), *tensors_in(request.arguments[slot])]
        return reads + [grad for p in params if (grad := main_grad_of(p)) is not None]

    def graphable(self) -> Mapping[int, SiteSpec]:
        """The sites that do not stay eager, by index."""
        return {index: spec for index, spec in enumerate(self.specs) if index not in self.eager_sites}

    def keep_eager(self, index: int, reason: EagerReason) -> None:
        """Leaves one site eager, counted under `reason`."""
        self.eager_sites[index] = reason
        self.core.set_site_eager_reason(index, reason)

    def take_failures(self) -> list[str]:
        """What could not be captured since this was last asked, in words."""
        failures, self.failures = self.failures, []
        return [str(failure) for failure in failures]

    def drop(self, keys: Iterable[Any]) -> None:
        """Releases every graph of some variants; the memory goes to later ones. Call it between steps only.

        Raises:
            RuntimeError: where a slot is still held, naming by whom.
        """
        self.backend.settle()
        for key in keys:
            if key in self.variants:
                self.core.drop_variant(self.variants[key])
                del self.captured[self.variants.pop(key)]

    def release(self) -> None:
        """Drops every graph at once. Backward passes that are still pending raise from now on."""
        if self.state != _C.BankState.RELEASED:
            self.backend.settle()
            self.core.release()
            self.captured.clear()

    # -- micro-batches ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def micro_batch(self, key: Hashable, sources: Sequence[Tensor] = ()) -> Iterator[EagerReason | None]:
        """Runs one micro-batch on a slot of variant `key`; yields None, or why there is none.

        Args:
            key: the variant.
            sources: metadata as the variant's `MetadataSpec`s name it, on the bank's device.
        """
        reason = self.begin(key, sources)
        try:
            yield reason
        finally:
            if reason is None:
                self.end()

    def begin(
        self, key: Hashable, sources: Sequence[Tensor] = (), *, look_at_grads: bool = True
    ) -> EagerReason | None:
        """Leases a slot, or answers why not; `end()` ends what this began.

        Args:
            key: the variant.
            sources: metadata, as `micro_batch()` takes it.
            look_at_grads: False where it is known that no parameter holds a `.grad` beside `main_grad`,
                which eager would add as well.
        """
        index = self.variants.get(key)
        if index is None:
            return self.eager_variants.get(key, EagerReason.WARMING_UP)
        reason = self.core.begin(index, sources, look_at_grads)
        if reason is None:
            self._running = self.captured[index], sources
        return reason

    def end(self) -> None:
        """Ends the running micro-batch; its slot is free when nobody holds a tensor or backward of it."""
        self._running = None
        self.core.end()

    def holders(self) -> str:
        """Who holds slots, in words; empty where every slot is free."""
        return self.core.describe_holders()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Runs every step inside a micro-batch: a site's graph, or its module where that answers so.

        What is eager runs as its graph would: on the captured rows, with the variant's arguments over the
        micro-batch's own metadata.
        """
        out = self.replay_all(hidden)
        if out is not NotImplemented:
            return out
        given: Any = hidden
        arguments: Mapping[str, Any] | None = None  # of what is eager: made once
        try:
            sites = iter(zip(self.specs, self.sites, strict=True))
            for place, step in enumerate(self.steps):
                site = None if isinstance(step, EagerPart) else next(sites)[1]
                next_given: Any = NotImplemented if site is None else site(given)
                if next_given is NotImplemented:
                    if arguments is None:
                        arguments = self._arguments()
                    next_given = step.call(self._staged(given) if place == 0 else given, **arguments)
                given = next_given
        except BaseException:
            given = next_given = None  # the traceback keeps this frame, and would keep a slot
            raise
        result: Tensor = given
        return result

    def _arguments(self) -> Mapping[str, Any]:
        assert self._running is not None  # a site would have raised
        variant, sources = self._running
        return variant.arguments(self.core.slot_index, sources)

    def _staged(self, hidden: Tensor) -> Tensor:
        assert self._running is not None
        variant, sources = self._running
        return variant.staged(hidden, sources)

    # -- finished backward passes -----------------------------------------------------------------

    def listen(
        self, wants: Callable[[], bool], done: Callable[[int, int], None], noticed: Sequence[int]
    ) -> None:
        """Reports finished backward passes, from whatever thread runs them.

        Args:
            wants: asked once for each micro-batch whether anybody wants to know.
            done: called with the first and the last of some sites that follow one another, when all of
                their gradients are in `main_grad`; each site is told once.
            noticed: the sites after whose backward `done` is called at once. At the end of each autograd
                node it is called for what is left.
        """
        self._listener = wants, done, noticed
        self.core.set_listener(*self._listener)

    @contextlib.contextmanager
    def without_listener(self) -> Iterator[None]:
        """Around backward passes that nobody is told of."""
        if self._listener is None:
            yield
            return
        self.core.set_listener(lambda: False, lambda *_: None, [])
        try:
            yield
        finally:
            self.core.set_listener(*self._listener)

    # -- figures ---------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """`calls`, `replays` and the eager calls of each reason; replays + eager == calls."""
        return {name: count - self._not_counted[name] for name, count in self.core.counters().items()}

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Around calls that `counters()` leaves out."""
        before = self.core.counters()
        try:
            yield
        finally:
            for name, count in self.core.counters().items():
                self._not_counted[name] += count - before[name]

    @property
    def most_in_flight(self) -> int:
        """The most micro-batches that held slots at once."""
        return self.core.most_in_flight

    def last_leases(self) -> list[Lease]:
        """When slots were last leased; none where there is only one."""
        return [
            Lease(slot=slot, grad=grad, begin=begin / 1e6, end=end / 1e6 if end else None)
            for slot, grad, begin, end in self.core.last_leases()
        ]

    def pool_bytes(self) -> int:
        """Device memory that the graphs' pools hold."""
        return self.backend.pool_bytes()
