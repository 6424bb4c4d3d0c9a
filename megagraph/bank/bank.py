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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.backends import PassMemories, backend_for
from megagraph.bank.capture import BankOptions, CapturePlan, Saves
from megagraph.bank.restore import main_grad_of, plain_tensors
from megagraph.bank.rng import RngSources
from megagraph.bank.sites import (
    CapturedVariant,
    CaptureError,
    EagerPart,
    SiteSpec,
    StepOrder,
    VariantSpec,
    tensors_in,
)
from megagraph.decide.reasons import EagerReason
from megagraph.log import log
from megagraph.timeline import Lease

__all__ = ["Bank", "Progress"]

# Called with (captured so far, captures in all, what comes next).
Progress = Callable[[int, int, str], None]


_DEFAULT = BankOptions()


def _cannot(hidden: Tensor) -> Any:
    return NotImplemented


class Bank(_C.GraphBank):
    """Sites that run one after another, and all of their graphs.

    Args:
        modules: in execution order; a plain module is called with the hidden states and the variant's
            arguments. Parts that stay eager may stand anywhere.
        device: where the model is. On the CPU the host backend stands in for graphs.
        num_slots: micro-batches that may be in flight at once.
        options: what graphs are captured under.
        former: a bank of as many slots whose figures go on.

    Attributes:
        steps, specs: all of them; the sites among them.
        sites, replay_all: what calls of these replay: one by one; all steps in one go and with one autograd
            node. `NotImplemented` where that cannot be.
        variants, captured: the graphs of each variant, by index; what they were captured for.
        eager_sites, eager_variants: what stays eager, and why: sites by index, and variants of which no site
            could be captured.
        gradient_order: of each captured site: its parameters with main_grad, as the backward pass reaches
            them.

    Raises:
        ValueError: where no module is to be captured.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module | SiteSpec | EagerPart],
        device: torch.device | str,
        *,
        num_slots: int = 1,
        options: BankOptions = _DEFAULT,
        former: "Bank | None" = None,
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
        self.options, self.order = options, StepOrder(self.steps)
        self.rng = RngSources(device, options.trackers)
        # Whether trackers draw from other generators than the graphs, which must not be replayed then.
        self.has_other_streams = self.rng.has_other_streams
        self.backend = backend_for(device, self.rng.generators)
        super().__init__(
            self.backend.device,
            len(self.specs),
            num_slots=num_slots,
            pools=self.backend.add_pools(num_slots),
            poison=options.poison or device.type == "cpu",
            holds_collectives=options.holds_collectives,
        )
        for index, site in enumerate(self.specs):
            self.set_site_calls(index, site.calls)
        self.sites = tuple(self.site(index) for index in range(len(self.specs)))
        self.replay_all = self.span() if len(self.specs) == len(self.steps) else _cannot
        self.variants: dict[Any, int] = {}
        self.captured: dict[int, CapturedVariant] = {}
        self.eager_sites: dict[int, EagerReason] = {}
        self.eager_variants: dict[Any, EagerReason] = {}
        self.gradient_order: dict[int, Sequence[Tensor]] = {}
        self.failures: list[CaptureError] = []
        self.capture_seconds = 0.0
        if former is not None:
            self.continue_from(former)
            self.capture_seconds = former.capture_seconds

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
            [CapturedVariant(spec, self.num_slots) for spec in variants],
            key=lambda variant: (variant.spec.training, variant.spec.rows),
            reverse=True,
        )
        self.rng.expect_streams()
        start = time.perf_counter()
        self.become(_C.BankState.CAPTURING)
        was_enabled = gc.isenabled()
        self.backend.settle()
        self.backend.collect()
        gc.disable()
        try:
            self.drop(variant.spec.key for variant in order)
            # Every warm-up first: beside a pool that is full already, its memory would come on top.
            saves, memories = [], []
            for variant in order:
                with variant.spec.context():
                    saves.append(self._warm_up(variant))
            for variant in order:
                with variant.spec.context():
                    memories.append(self._learn_memory(variant))
            self.backend.settle()
            for done, variant in enumerate(order):
                if progress is not None:
                    progress(done, len(order), f"variant {variant.spec}")
                with variant.spec.context():
                    self._capture_one(variant, saves[done], memories[done])
            if progress is not None:
                progress(len(order), len(order), "done")
        finally:
            if was_enabled:
                gc.enable()
            self.backend.settle()
            self.become(_C.BankState.SEALED)
            self.capture_seconds += time.perf_counter() - start

    def _plan(self, variant: CapturedVariant, slot: int) -> CapturePlan:
        backend, rng, options = self.backend, self.rng, self.options
        return CapturePlan(backend, rng, options, self.order, self.graphable(), variant, slot)

    def _warm_up(self, variant: CapturedVariant) -> Mapping[int, Saves]:
        """Runs a variant once, and again without the site that failed."""
        while self.graphable():
            try:
                return self._plan(variant, 0).warm_up()
            except CaptureError as error:
                self._give_up_site(error)
            gc.collect()  # frames of the failed attempt hold its memory in cycles
        return {}

    def _learn_memory(self, variant: CapturedVariant) -> PassMemories | None:
        """Captures a variant once, and drops it, to see what each pass allocates. None of a single slot."""
        while self.num_slots > 1 and self.graphable():
            try:
                with self.backend.learning() as given:
                    if given is None:
                        return None
                    pool, memories = given
                    self._plan(variant, 0).capture(memories, pool)
                return memories
            except CaptureError as error:
                self._give_up_site(error)
            gc.collect()
        return None

    def _capture_one(
        self, variant: CapturedVariant, saves: Mapping[int, Saves], memories: PassMemories | None
    ) -> None:
        """Captures a variant into every slot, and again without the site that failed."""
        while self.graphable():
            try:
                plans = [self._plan(variant, slot) for slot in range(self.num_slots)]
                by_slot = [plan.capture(memories) for plan in plans]
                variant.notes = [plan.notes for plan in plans]
                self._add_variant(variant, by_slot, saves)
                return
            except CaptureError as error:
                self._give_up_site(error)
            gc.collect()
            memories = self._learn_memory(variant)  # other sites hand on other tensors
        self.eager_variants[variant.spec.key] = self.eager_sites[0]

    def _give_up_site(self, error: CaptureError) -> None:
        log.warning("stays eager (%s): %s", error.reason.name, error)
        # The traceback's frames hold tensors of the failed attempt, some of them in the slot's pool.
        error.__cause__ = error.__context__ = error.__traceback__ = None
        self.failures.append(error)
        self.keep_eager(error.index, error.reason)

    def _add_variant(
        self,
        variant: CapturedVariant,
        by_slot: Sequence[Mapping[int, _C.SiteGraph]],
        saves: Mapping[int, Saves],
    ) -> None:
        spec = variant.spec
        index = self.add_variant(
            training=spec.training,
            end_source=spec.end_source,
            fewer_rows=spec.fewer_rows,
            metadata=[*spec.metadata.values()],
            buffers=[[buffers[name] for buffers in variant.buffers] for name in spec.metadata],
        )
        for slot, graphs in enumerate(by_slot):
            for site, graph in graphs.items():
                graph.saves_input, graph.saves_outputs = saves[site]
                graph.reads = self._reads(self.specs[site], variant, slot)
                if self.options.annotate:
                    graph.set_range(f"{self.specs[site].name}, {spec}, slot {slot}")
                self.set_graph(site, index, slot, graph)
                if graph.accumulated:
                    self.gradient_order[site] = graph.accumulated
        variant.num_graphs = (1 + spec.training) * sum(map(len, by_slot))
        self.variants[spec.key] = index
        self.captured[index] = variant

    def _reads(self, site: SiteSpec, variant: CapturedVariant, slot: int) -> list[Tensor]:
        """What a site's graphs read beside their boundaries, to be kept as long as they live."""
        params = site.parameters()
        reads = [*params, *(buffer for _name, buffer in site.named_buffers()), *site.further_state()]
        reads += [*plain_tensors([*site.named_modules()]).values(), *variant.buffers[slot].values()]
        reads += tensors_in(variant.given[slot])
        return reads + [grad for p in params if (grad := main_grad_of(p)) is not None]

    def graphable(self) -> Mapping[int, SiteSpec]:
        """The sites that do not stay eager, by index."""
        return {index: spec for index, spec in enumerate(self.specs) if index not in self.eager_sites}

    def keep_eager(self, index: int, reason: EagerReason) -> None:
        """Leaves one site eager, counted under `reason`."""
        self.eager_sites[index] = reason
        self.set_site_eager_reason(index, reason)

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
                self.drop_variant(self.variants[key])
                del self.captured[self.variants.pop(key)]

    def release(self) -> None:
        """Drops every graph at once. Backward passes that are still pending raise from now on."""
        if self.state != _C.BankState.RELEASED:
            self.backend.settle()
            super().release()
            self.captured.clear()

    # -- micro-batches ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def micro_batch(self, key: Hashable, sources: Sequence[Tensor] = ()) -> Iterator[EagerReason | None]:
        """Runs one micro-batch on a slot of variant `key`; yields None, or why there is none.

        Args:
            key: the variant.
            sources: metadata as the variant's `MetadataSpec`s name it, on the bank's device.
        """
        index = self.variants.get(key)
        reason = (
            self.eager_variants.get(key, EagerReason.WARMING_UP)
            if index is None
            else self.begin(index, sources, True)
        )
        try:
            yield reason
        finally:
            if reason is None:
                self.end()

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Around calls that counters leave out, and backward passes that nobody is told of."""
        before = self.counters()
        self.set_listening(False)
        try:
            yield
        finally:
            self.set_listening(True)
            self.set_counters(before)

    # -- figures ---------------------------------------------------------------------------------

    def leases(self) -> list[Lease]:
        """When slots were last leased; none where there is only one."""
        return [
            Lease(slot=slot, grad=grad, begin=begin / 1e6, end=end / 1e6 if end else None)
            for slot, grad, begin, end in self.last_leases()
        ]

    def pool_bytes(self) -> int:
        """Device memory that the graphs' pools hold."""
        return self.backend.pool_bytes()
