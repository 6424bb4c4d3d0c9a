# SPDX-License-Identifier: Apache-2.0
"""The graphs of one model and their life: warm-up, capture, sealed, suspended, released.

Generic: any chain of `nn.Module`s that map one tensor to one tensor of as many rows. Knows nothing
of Megatron, of packs, or of when to capture.
"""

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.backends import Backend, Notes, PassMemories, backend_for
from megagraph.bank.bits import MOST_FURTHER
from megagraph.bank.capture import CapturePlan, Conditions, Exchange, Guard, alone
from megagraph.bank.chain import CapturedVariant, Chain
from megagraph.bank.edges import Saves
from megagraph.bank.restore import main_grad_of, plain_tensors
from megagraph.bank.rng import RngSources, RngTracker, TrackerSource
from megagraph.bank.sites import CaptureError, EagerPart, SiteSpec, VariantSpec, arguments_of, tensors_in
from megagraph.bank.verify import Example, Verification
from megagraph.decide.reasons import EagerReason
from megagraph.log import log

__all__ = ["Bank", "Progress"]

# Called with (captured so far, captures in all, what comes next).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class _Request:
    chain: "Chain"
    variant: VariantSpec
    buffers: Sequence[Mapping[str, Tensor]]  # by slot
    arguments: Sequence[Mapping[str, Any]]  # over the buffers of each slot


class Bank:
    """All graphs of one model.

    Args:
        device: where the model is. On the CPU the host backend stands in for graphs.
        trackers: named random streams that the model draws from; a function where a tracker may be replaced.
        poison: fill the boundaries of a freed slot with NaN (always on the CPU), so that whatever
            reads them too late shows.
        guard: entered around everything that runs in a capture.
        exchange: asks the ranks whose graphs hold the same collectives: a site that one of them cannot
            capture stays eager on all of them.
        annotate: name each replay for profilers, as a range of torch's and as an NVTX range.
        left_out: names of attributes that calls may change: graphs do not, and the caller answers for that.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        trackers: Sequence[RngTracker | TrackerSource] = (),
        poison: bool = False,
        guard: Guard = contextlib.nullcontext,
        exchange: Exchange = alone,
        annotate: bool = False,
        left_out: Collection[str] = (),
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.rng = RngSources(device, trackers)
        # Whether trackers draw from other generators than the graphs, which must not be replayed then.
        self.has_other_streams = self.rng.has_other_streams
        self.backend: Backend = backend_for(device, self.rng.generators)
        self._conditions = Conditions(
            backend=self.backend, rng=self.rng, guard=guard, exchange=exchange, left_out=left_out
        )
        self._annotate = annotate
        self.core = _C.GraphBank(self.backend.device)
        # Counts calls, `(reason, calls)`, that run eager without asking a site. No function of ours is around
        # it, which micro-batches that no graph can take would pay for.
        self.count_eager: Callable[[EagerReason, int], None] = self.core.count_eager
        self.chains: list[Chain] = []
        self.failures: list[CaptureError] = []
        self.capture_seconds = 0.0
        self._poison = poison or device.type == "cpu"
        self._num_pools = 0
        self._not_counted: Counter[str] = Counter()  # calls that were made to verify graphs

    @property
    def num_graphs(self) -> int:
        """Graphs of all chains, forwards and backwards."""
        return sum(chain.num_graphs for chain in self.chains)

    @property
    def state(self) -> _C.BankState:
        """Where the bank is in its life."""
        return self.core.state

    def add_chain(
        self,
        modules: Sequence[nn.Module | SiteSpec | EagerPart],
        *,
        num_slots: int = 1,
        holds_collectives: bool = False,
    ) -> Chain:
        """Adds a chain of modules, before anything is captured.

        Args:
            modules: in execution order; a plain module is called with the hidden states and the variant's
                arguments. Parts that stay eager may stand anywhere.
            num_slots: micro-batches of this chain that may be in flight at once.
            holds_collectives: the graphs contain collectives, so that no rank may fall back alone.
        """
        steps = [
            SiteSpec(name=f"{index}.{type(module).__name__}", module=module)
            if isinstance(module, nn.Module)
            else module
            for index, module in enumerate(modules)
        ]
        num_sites = sum(isinstance(step, SiteSpec) for step in steps)
        if num_sites == 0:
            what = f"{len(steps)} parts that stay eager" if steps else "none"
            raise ValueError(f"expected at least one module, got {what}")
        core = self.core.add_chain(num_sites)
        for index, site in enumerate(step for step in steps if isinstance(step, SiteSpec)):
            core.set_site_calls(index, site.calls)
        pools = self.backend.add_pools(num_slots)
        core.set_slots(num_slots, pools, self._poison, holds_collectives)
        self.chains.append(Chain(core, steps, self._num_pools, holds_collectives))
        self._num_pools += num_slots
        return self.chains[-1]

    def capture(
        self, requests: Mapping[Chain, Sequence[VariantSpec]], progress: Progress | None = None
    ) -> None:
        """Captures variants of chains and seals the bank. Call it between steps only.

        A site that cannot be captured stays eager, is logged and listed in `failures`; the others go
        on. The largest variant comes first: the smaller ones then live in its memory.

        Raises:
            RuntimeError: where a slot is still held, naming by whom.
            ValueError: where an argument of a variant would go stale, naming it.
        """
        for chain in requests:
            if holders := chain.holders():
                raise RuntimeError(f"capture needs every slot to be free; still held: {holders}")
        order = sorted(
            (self._request(chain, variant) for chain, variants in requests.items() for variant in variants),
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
            request.chain.graphable(),
            request.chain.shape,
            request.variant,
            request.buffers[slot],
            request.arguments[slot],
        )

    def _warm_up(self, request: _Request) -> Mapping[int, Saves]:
        """Runs a variant once, and again without the site that failed."""
        while request.chain.graphable():
            try:
                return self._plan(request, 0).warm_up()
            except CaptureError as error:
                self._give_up_site(request.chain, error)
            gc.collect()  # frames of the failed attempt hold its memory in cycles
        return {}

    def _learn_memory(self, request: _Request) -> PassMemories | None:
        """Captures a variant once, and drops it, to see what each pass allocates. None of a single slot."""
        while request.chain.num_slots > 1 and request.chain.graphable():
            try:
                with self.backend.learning() as given:
                    if given is None:
                        return None
                    pool, memories = given
                    self._plan(request, 0).capture(pool, memories)
                return memories
            except CaptureError as error:
                self._give_up_site(request.chain, error)
            gc.collect()
        return None

    def _capture_one(
        self, request: _Request, saves: Mapping[int, Saves], memories: PassMemories | None
    ) -> None:
        """Captures a variant into every slot, and again without the site that failed."""
        chain = request.chain
        while chain.graphable():
            try:
                plans = [self._plan(request, slot) for slot in range(chain.num_slots)]
                by_slot = [plan.capture(chain.first_pool + slot, memories) for slot, plan in enumerate(plans)]
                self._add_variant(request, by_slot, saves, [plan.notes for plan in plans])
                return
            except CaptureError as error:
                self._give_up_site(chain, error)
            gc.collect()
            memories = self._learn_memory(request)  # other sites hand on other tensors
        chain.eager_variants[request.variant.key] = chain.eager_sites[0]

    def _give_up_site(self, chain: Chain, error: CaptureError) -> None:
        log.warning("stays eager (%s): %s", error.reason.name, error)
        # The traceback's frames hold tensors of the failed attempt, some of them in the slot's pool.
        error.__cause__ = error.__context__ = error.__traceback__ = None
        self.failures.append(error)
        chain.keep_eager(error.index, error.reason)

    def _request(self, chain: Chain, variant: VariantSpec) -> _Request:
        buffers = [
            {name: spec.buffer() for name, spec in variant.metadata.items()} for _ in range(chain.num_slots)
        ]
        with variant.context():
            arguments = [arguments_of(variant, of_slot) for of_slot in buffers]
        return _Request(chain=chain, variant=variant, buffers=buffers, arguments=arguments)

    def _add_variant(
        self,
        request: _Request,
        by_slot: Sequence[Mapping[int, _C.SiteGraph]],
        saves: Mapping[int, Saves],
        notes: Sequence[Notes],
    ) -> None:
        chain, variant = request.chain, request.variant
        per_site = 2 if variant.training else 1
        index = chain.core.add_variant(
            training=variant.training,
            end_source=variant.end_source,
            fewer_rows=variant.fewer_rows,
            metadata=[*variant.metadata.values()],
            buffers=[[buffers[name] for buffers in request.buffers] for name in variant.metadata],
        )
        for slot, graphs in enumerate(by_slot):
            for site, graph in graphs.items():
                graph.saves_input, graph.saves_outputs = saves[site]
                graph.reads = self._reads(chain.specs[site], request, slot)
                if self._annotate:
                    graph.set_range(f"{chain.specs[site].name}, {variant}, slot {slot}")
                chain.core.set_graph(site, index, slot, graph)
                if graph.accumulated:
                    chain.gradient_order[site] = graph.accumulated
        num_graphs = per_site * sum(map(len, by_slot))
        captured = CapturedVariant(spec=variant, buffers=request.buffers, num_graphs=num_graphs, notes=notes)
        chain.add(index, captured)

    def drop(self, chain: Chain, keys: Iterable[Any]) -> None:
        """Releases the graphs of some variants of a chain; the others go on. Call it between steps only.

        Raises:
            RuntimeError: where a slot is still held, naming by whom.
        """
        self.backend.settle()
        for key in keys:
            chain.drop(key)

    def _reads(self, site: SiteSpec, request: _Request, slot: int) -> list[Tensor]:
        """What a site's graphs read beside their boundaries, to be kept as long as they live."""
        params = site.parameters()
        reads = [*params, *site.buffers(), *plain_tensors([*site.named_modules()]).values()]
        reads += [*request.buffers[slot].values(), *tensors_in(request.arguments[slot])]
        return reads + [grad for p in params if (grad := main_grad_of(p)) is not None]

    def verify(self, chain: Chain, key: Any, example: Example) -> Verification:
        """Compares a variant's graphs, of each slot, with its modules on a real micro-batch; counts no calls.

        Call it between steps only, with every slot free. Everything is as it was afterwards.

        Args:
            chain: of this bank.
            key: the variant.
            example: the micro-batch.

        Returns:
            What came out, Note [Verification] in megagraph/bank/verify.py.

        Raises:
            RuntimeError: where the variant cannot run it, with the reason.
            KeptMemoryError: where a module keeps memory of its call, over which graphs would write.
        """
        verification = self._verify_once(chain, key, example)
        for times in range(MOST_FURTHER):
            if not verification.is_doubtful(times):
                break
            verification.keep_what_recurs(self._verify_once(chain, key, example), times)
        return verification

    def _verify_once(self, chain: Chain, key: Any, example: Example) -> Verification:
        before = self.core.counters()
        how = self._conditions.exchange, self.core.counters
        verification = Verification(chain, key, self.backend, self.rng, example, *how)
        try:
            with chain.without_listener(), self.backend.recording():
                for _slot in range(chain.num_slots):  # which take turns
                    if (reason := verification.run()) is not None:
                        raise RuntimeError(f"variant {key} runs eager ({reason.name}) and cannot be verified")
        finally:
            self.backend.settle()  # no later work on this stream would take that memory
            for name, count in self.core.counters().items():
                self._not_counted[name] += count - before[name]
        return verification

    def suspend(self) -> None:
        """No replays until `resume()`: for hosts that move weights or free gradient storage."""
        self.core.become(_C.BankState.SUSPENDED)

    def resume(self) -> None:
        """Allows replays again."""
        self.core.become(_C.BankState.SEALED)

    def take_failures(self) -> list[str]:
        """What could not be captured since this was last asked, in words."""
        failures, self.failures = self.failures, []
        return [str(failure) for failure in failures]

    def counters(self) -> dict[str, int]:
        """`calls`, `replays` and the eager calls of each reason; replays + eager == calls."""
        return {name: count - self._not_counted[name] for name, count in self.core.counters().items()}

    def pool_bytes(self) -> int:
        """Device memory that the graphs' pools hold."""
        return self.backend.pool_bytes()

    def release(self) -> None:
        """Drops every graph at once. Backward passes that are still pending raise from now on."""
        if self.state != _C.BankState.RELEASED:
            self.backend.settle()
            self.core.release()
            for chain in self.chains:
                chain.captured.clear()
