# SPDX-License-Identifier: Apache-2.0
"""The graphs of one chunk of a model and their life: warm-up, capture, sealed, released.

Generic: `nn.Module`s that map one tensor to one tensor of as many rows, one after another. Knows nothing
of Megatron, of packs, or of when to capture.
"""

from __future__ import annotations  # a CPU-only build has no SlotMemory

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.backends import backend_for
from megagraph.bank.capture import BankOptions, CapturePlan
from megagraph.bank.restore import main_grad_of, written_by
from megagraph.bank.rng import RngSources
from megagraph.bank.sites import CapturedVariant, CaptureError, EagerPart, SiteSpec, VariantSpec
from megagraph.log import log
from megagraph.reasons import EagerReason

__all__ = ["Bank", "Progress"]

# Called with (captured so far, captures in all, what comes next).
Progress = Callable[[int, int, str], None]

_DEFAULT = BankOptions()
_Made = TypeVar("_Made")


class Bank(_C.GraphBank):
    """Sites that run one after another, and all of their graphs.

    A plain module is called with the hidden states and the variant's arguments. Parts that stay eager may
    stand anywhere. On the CPU the host backend stands in for graphs. The figures of `former`, a bank of as
    many slots, go on.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module | SiteSpec | EagerPart],
        device: torch.device | str,
        *,
        num_slots: int = 1,
        options: BankOptions = _DEFAULT,
        former: Bank | None = None,
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
        self.specs = tuple(step for step in self.steps if isinstance(step, SiteSpec))  # the sites among them
        if not self.specs:
            what = f"{len(self.steps)} parts that stay eager" if self.steps else "none"
            raise ValueError(f"expected at least one module, got {what}")
        are_sites = [isinstance(step, SiteSpec) for step in self.steps]
        # Sites, by index, behind which something stays eager; -1 where it comes before the first one.
        self.gaps = frozenset(sum(are_sites[:at]) - 1 for at, it in enumerate(are_sites) if not it)
        self.options = options
        self.rng = RngSources(device, options.tracker)
        # Whether the tracker draws from other generators than the graphs, which must not be replayed then.
        self.has_other_streams = self.rng.has_other_streams
        self.backend = backend_for(device, self.rng.generators)
        slots, sites, facing = range(num_slots), range(len(self.specs)), options.facing
        # Of each slot the pool of what its forwards keep, by site, and that of what passes hand over. Of
        # everything else it has one.
        pool_of = {part: num_slots + at for at, part in enumerate(sorted({*itertools.chain(*facing)}))}
        self._kept_in = [[pool_of[part] for part in of_slot] for of_slot in facing] or [
            [slot] * len(sites) for slot in slots
        ]
        num_pools = num_slots + len(pool_of)
        self._given_back = [num_pools] * num_slots if options.share_given_back else [*slots]
        holds = self.backend.add_pools(num_pools + options.share_given_back)
        pools_of = [{slot, self._given_back[slot], *self._kept_in[slot]} for slot in slots]
        super().__init__(
            self.backend.device,
            len(self.specs),
            num_slots=num_slots,
            pools=[[holds[at] for at in its] for its in pools_of] if holds else [],
            facing=[[it for it in sites if facing[1][it] == part] for part in facing[0]] if facing else [],
            poison=options.poison or device.type == "cpu",
            run_eager_alike=options.run_eager_alike,
        )
        for index, site in enumerate(self.specs):
            self.set_site_calls(index, site.calls)
        # What calls replay, of one site, or of all in one go and with one autograd node: `NotImplemented`
        # where that cannot be.
        self.sites = tuple(self.site(index) for index in range(len(self.specs)))
        self.replay_all = (lambda _hidden: NotImplemented) if self.gaps else self.span()
        self.variants: dict[Any, int] = {}  # the graphs of each variant, by index
        self.captured: dict[int, CapturedVariant] = {}  # what these were captured for
        # What stays eager, and why: sites by index, and variants of which no site could be captured.
        self.eager_sites: dict[int, EagerReason] = {}
        self.eager_variants: dict[Any, EagerReason] = {}
        # Of each captured site: its parameters with main_grad, as the backward pass reaches them when most of
        # them are trained.
        self.gradient_order: dict[int, Sequence[Tensor]] = {}
        self.failures: list[CaptureError] = []
        self._said: set[str] = set() if former is None else former._said  # of them, in the log
        self.capture_seconds: float = 0.0 if former is None else former.capture_seconds
        if former is not None:
            self.continue_from(former)

    @property
    def num_graphs(self) -> int:
        """Graphs of all variants, forwards and backwards, in every slot."""
        return sum(variant.num_graphs for variant in self.captured.values())

    def pool_bytes(self) -> int:
        """Device memory that the graphs' pools hold."""
        return self.backend.pool_bytes()

    # -- capture ---------------------------------------------------------------------------------

    def capture(self, variants: Iterable[VariantSpec], progress: Progress | None = None) -> None:
        """Captures variants and seals the bank. Call it between steps only, with every slot free.

        A variant that has graphs gets others. A site that cannot be captured stays eager, is logged and
        listed in `failures`; the others go on.
        """
        if holders := self.holders():
            raise RuntimeError(f"capture needs every slot to be free; still held: {holders}")
        order = [CapturedVariant(spec, self.num_slots) for spec in variants]
        # The largest one first: the others then live in its memory.
        order.sort(key=lambda variant: (variant.spec.training, variant.spec.rows), reverse=True)
        self.rng.expect_streams()
        say, start = progress or (lambda *_said: None), time.perf_counter()
        self.become(_C.BankState.CAPTURING)
        was_enabled = gc.isenabled()
        self.backend.settle()
        self.backend.collect()
        gc.disable()
        try:
            self.drop(variant.spec.key for variant in order)
            for prepare in (self.warm_up, self._learn_memory):
                for variant in order:
                    with variant.spec.context():
                        prepare(variant)
            self.backend.settle()
            for done, variant in enumerate(order):
                say(done, len(order), f"variant {variant.spec}")
                with variant.spec.context():
                    self._capture_one(variant)
            say(len(order), len(order), "done")
        finally:
            if was_enabled:
                gc.enable()
            self.backend.settle()
            self.backend.collect(generation=0)  # what the warm-up has left is not to be kept
            for variant in order:
                for index in self.graphable().keys() & variant.reads.keys():
                    variant.reads[index].keep(self._reads(self.specs[index], variant, 0))
            self.become(_C.BankState.SEALED)
            self.capture_seconds += time.perf_counter() - start

    def _plan(self, variant: CapturedVariant, slot: int) -> CapturePlan:
        return CapturePlan(self.backend, self.rng, self.options, self.gaps, self.graphable(), variant, slot)

    def _without_failing(
        self, attempt: Callable[[], _Made], again: Callable[[], None] = lambda: None
    ) -> _Made | None:
        """What an attempt makes, repeated without each site that fails; None once no site is left."""
        while self.graphable():
            try:
                return attempt()
            except CaptureError as error:
                if str(error) not in self._said:  # in each capture
                    self._said.add(str(error))
                    log.warning("stays eager (%s): %s", error.reason.name, error)
                # The traceback's frames hold tensors of the failed attempt, some of them in the slot's pool.
                error.__cause__ = error.__context__ = error.__traceback__ = None
                self.failures.append(error)
                self.keep_eager(error.index, error.reason)
            gc.collect()  # frames of the failed attempt hold its memory in cycles
            again()
        return None

    def warm_up(self, variant: CapturedVariant) -> None:
        """Before a capture, in its context: runs every site once; what no graph can replace stays eager."""
        self._without_failing(lambda: self._plan(variant, 0).warm_up())

    def _learn_memory(self, variant: CapturedVariant) -> None:
        """Captures a variant once, and drops it, to see what each pass allocates. Not of a single slot."""

        def attempt() -> _C.SlotMemory | None:
            with self.backend.learning() as given:
                if given is None:
                    return None
                pool, memory = given
                self._plan(variant, 0).capture(memory, pool, [pool] * len(self.specs), pool)
            return memory

        variant.memory = self._without_failing(attempt)

    def _capture_one(self, variant: CapturedVariant) -> None:
        def attempt() -> Sequence[Mapping[int, _C.SiteGraph]]:
            memory, back = variant.memory, self._given_back
            return [
                self._plan(variant, slot).capture(memory, slot, self._kept_in[slot], back[slot])
                for slot in range(self.num_slots)
            ]

        # Other sites hand on other tensors.
        by_slot = self._without_failing(attempt, again=lambda: self._learn_memory(variant))
        variant.memory = None
        if by_slot is None:
            self.eager_variants[variant.spec.key] = self.eager_sites[0]
        else:
            self._add_variant(variant, by_slot)

    def _add_variant(self, variant: CapturedVariant, by_slot: Sequence[Mapping[int, _C.SiteGraph]]) -> None:
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
                graph.saves_input, graph.saves_outputs = variant.saves[site]
                graph.reads = self._reads(self.specs[site], variant, slot)
                if slot == 0:  # they are alike
                    graph.borrowed = variant.reads[site]
                if self.options.annotate:
                    graph.set_range(f"{self.specs[site].name}, {spec}, slot {slot}")
                self.set_graph(site, index, slot, graph)
                former = self.gradient_order.get(site, ())
                self.gradient_order[site] = max(graph.accumulated, former, key=len)
        rests = [site.finish for site in self.graphable().values() if spec.training and site.finish]
        variant.sites = by_slot[0].keys()
        variant.num_graphs = (1 + spec.training) * sum(map(len, by_slot)) + len(by_slot) * len(rests)
        self.variants[spec.key] = index
        self.captured[index] = variant

    def _reads(self, site: SiteSpec, variant: CapturedVariant, slot: int) -> list[Tensor]:
        """What a site's graphs read beside their boundaries, to be kept as long as they live."""
        params = site.parameters()
        reads = [*params, *written_by(site).values(), *variant.buffers[slot].values()]
        reads += _C.tensors_in(variant.given[slot])
        return reads + [grad for p in params if (grad := main_grad_of(p)) is not None]

    def is_entry(self, index: int) -> bool:
        """Whether a site takes the bank's input as it was given."""
        return index == 0 and -1 not in self.gaps

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
        """Releases every graph of some variants; the memory goes to later ones. Only with every slot free."""
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

        The variant's `MetadataSpec`s name metadata by its place in `sources`, on the bank's device.
        """
        if (index := self.variants.get(key)) is None:
            yield self.eager_variants.get(key, EagerReason.WARMING_UP)
            return
        reason = self.begin(index, sources, True)
        try:
            yield reason
        finally:
            if reason is None:
                self.end()
