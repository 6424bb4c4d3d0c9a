# SPDX-License-Identifier: Apache-2.0
"""The graphs of one model and their life: warm-up, capture, sealed, suspended, released.

Generic: any chain of `nn.Module`s that map one tensor to one tensor of as many rows. Knows nothing
of Megatron, of packs, or of when to capture. docs/generic.md has an example that runs.
"""

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.agreement import Exchange, alone
from megagraph.backends import Backend, backend_for
from megagraph.capture import CapturedSite, Conditions, Guard, capture_variant, warm_up_variant
from megagraph.chain import Chain
from megagraph.dispatch import EagerReason
from megagraph.rng import RngSources, RngTracker
from megagraph.sites import CaptureError, SiteSpec, VariantSpec

__all__ = ["Bank", "Chain", "Progress"]

_log = logging.getLogger("megagraph")

# Called with (captured so far, captures in all, what comes next).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class _Request:
    chain: "Chain"
    variant: VariantSpec
    buffers: Sequence[Mapping[str, Tensor]]  # by slot


class Bank:
    """All graphs of one model.

    Args:
        device: where the model is. On the CPU the host backend stands in for graphs.
        trackers: named random streams that the model draws from.
        poison: fill the boundaries of a freed slot with NaN (always on the CPU), so that whatever
            reads them too late shows.
        guard: entered around everything that runs in a capture.
        exchange: asks the ranks whose graphs hold the same collectives: a site that one of them cannot
            capture stays eager on all of them.
        annotate: name each replay for profilers, as a range of torch's and as an NVTX range.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        trackers: Sequence[RngTracker] = (),
        poison: bool = False,
        guard: Guard = contextlib.nullcontext,
        exchange: Exchange = alone,
        annotate: bool = False,
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.rng = RngSources(device, trackers)
        self.backend: Backend = backend_for(device, self.rng.generators())
        self._under = Conditions(backend=self.backend, rng=self.rng, guard=guard, exchange=exchange)
        self._annotate = annotate
        self.core = _C.GraphBank(self.backend.device)
        self.chains: list[Chain] = []
        self.failures: list[CaptureError] = []
        self.capture_seconds = 0.0
        self.num_graphs = 0
        self._poison = poison or device.type == "cpu"
        self._num_pools = 0

    @property
    def state(self) -> _C.BankState:
        """Where the bank is in its life."""
        return self.core.state

    def add_chain(
        self,
        modules: Sequence[nn.Module | SiteSpec],
        *,
        num_slots: int = 1,
        holds_collectives: bool = False,
    ) -> Chain:
        """Adds a chain of modules, before anything is captured.

        Args:
            modules: in execution order; a plain module is called with the hidden states and the variant's
                arguments.
            num_slots: micro-batches of this chain that may be in flight at once.
            holds_collectives: the graphs contain collectives, so that no rank may fall back alone.
        """
        if not modules:
            raise ValueError("expected at least one module, got none")
        sites = [
            module
            if isinstance(module, SiteSpec)
            else SiteSpec(name=f"{rank}.{type(module).__name__}", module=module)
            for rank, module in enumerate(modules)
        ]
        chunk = self.core.add_chunk(len(sites))
        pools = self.backend.add_pools(num_slots)
        chunk.set_slots(num_slots, pools, self._poison, holds_collectives)
        self.chains.append(Chain(chunk, sites, self._num_pools, num_slots))
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
        """
        for chain in requests:
            if not chain.chunk.all_free():
                raise RuntimeError(
                    "capture needs every slot to be free; still held: " + chain.chunk.describe_holders()
                )
        order = sorted(
            (
                _Request(chain=chain, variant=variant, buffers=self._metadata_buffers(chain, variant))
                for chain, variants in requests.items()
                for variant in variants
            ),
            key=lambda request: (request.variant.training, request.variant.rows),
            reverse=True,
        )
        start = time.perf_counter()
        self.core.become(_C.BankState.CAPTURING)
        was_enabled = gc.isenabled()
        self.backend.settle()
        gc.collect()
        gc.disable()
        try:
            # Every warm-up first: beside a pool that is full already, its memory would come on top.
            for request in order:
                with request.variant.context():
                    self._warm_up(request)
            self.backend.settle()
            for done, request in enumerate(order):
                if progress is not None:
                    progress(done, len(order), f"variant {request.variant}")
                with request.variant.context():
                    self._capture_one(request)
            if progress is not None:
                progress(len(order), len(order), "done")
        finally:
            if was_enabled:
                gc.enable()
            self.backend.settle()
            self.core.become(_C.BankState.SEALED)
            self.capture_seconds += time.perf_counter() - start

    def _warm_up(self, request: _Request) -> None:
        """Runs a variant once, and again without the site that failed."""
        chain, variant = request.chain, request.variant
        while len(chain.skipped) < len(chain.specs):
            try:
                warm_up_variant(self._under, chain.specs, chain.skipped, variant, request.buffers[0])
                return
            except CaptureError as error:
                self._skip(chain, error)
            gc.collect()  # frames of the failed attempt hold its memory in cycles

    def _capture_one(self, request: _Request) -> None:
        """Captures a variant into every slot, and again without the site that failed."""
        chain, variant = request.chain, request.variant
        while len(chain.skipped) < len(chain.specs):
            try:
                by_slot = [
                    self._capture_slot(chain, variant, slot, buffers)
                    for slot, buffers in enumerate(request.buffers)
                ]
                self._add_variant(chain, variant, request.buffers, by_slot)
                return
            except CaptureError as error:
                self._skip(chain, error)
            gc.collect()
        chain.uncapturable[variant.key] = chain.skipped[0]

    def _capture_slot(
        self, chain: Chain, variant: VariantSpec, slot: int, buffers: Mapping[str, Tensor]
    ) -> list[CapturedSite]:
        captured = capture_variant(
            self._under, chain.specs, chain.skipped, variant, chain.first_pool + slot, buffers
        )
        # From here on the slot's pool owns the boundaries, and the nesting rule guards them.
        seen: dict[int, Tensor] = {}

        def boundary(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return seen.setdefault(tensor.data_ptr(), self.backend.boundary(tensor))

        for site in captured:
            site.input, site.output = boundary(site.input), boundary(site.output)
            site.grad_output, site.grad_input = boundary(site.grad_output), boundary(site.grad_input)
            site.param_grads = [self.backend.boundary(grad) for grad in site.param_grads]
        return captured

    def _skip(self, chain: Chain, error: CaptureError) -> None:
        _log.warning("stays eager (%s): %s", error.reason.name, error)
        # The traceback's frames hold tensors of the failed attempt, some of them in the slot's pool.
        error.__cause__ = error.__context__ = error.__traceback__ = None
        self.failures.append(error)
        self.skip(chain, error.rank, error.reason)

    def skip(self, chain: Chain, rank: int, reason: EagerReason) -> None:
        """Leaves one site eager, counted under `reason`."""
        chain.skipped[rank] = reason
        chain.chunk.set_site_eager_reason(rank, int(reason))

    def _metadata_buffers(self, chain: Chain, variant: VariantSpec) -> list[dict[str, Tensor]]:
        return [
            {
                name: spec.example if spec.shared else spec.example.clone()
                for name, spec in variant.metadata.items()
            }
            for _ in range(chain.num_slots)
        ]

    def _add_variant(
        self,
        chain: Chain,
        variant: VariantSpec,
        buffers: Sequence[Mapping[str, Tensor]],
        by_slot: Sequence[Sequence[CapturedSite]],
    ) -> None:
        metadata = [
            _C.MetadataBuffer(
                spec.kind, [slot[name] for slot in buffers], spec.source, spec.fill, spec.extend_last
            )
            for name, spec in variant.metadata.items()
            if spec.source >= 0 or spec.kind is _C.SegmentKind.MASK
        ]
        index = chain.chunk.add_variant(variant.training, metadata, variant.end_source)
        for slot, captured in enumerate(by_slot):
            for site in captured:
                self._set_graph(chain, variant, index, slot, site, buffers[slot])
                if site.reached:
                    chain.gradient_order[site.rank] = site.reached
        chain.variants[variant.key] = index

    def _set_graph(
        self,
        chain: Chain,
        variant: VariantSpec,
        index: int,
        slot: int,
        site: CapturedSite,
        buffers: Mapping[str, Tensor],
    ) -> None:
        assert site.forward is not None and site.input is not None and site.output is not None
        module = chain.specs[site.rank].module
        reads = [*module.parameters(), *module.buffers(), *buffers.values()]
        reads += [grad for p in module.parameters() if (grad := getattr(p, "main_grad", None)) is not None]
        chain.chunk.set_graph(
            rank=site.rank,
            variant=index,
            slot=slot,
            forward=site.forward,
            backward=site.backward,
            inputs=[site.input],
            fewer_rows=variant.fewer_rows and site.rank == 0,
            outputs=[site.output],
            grad_outputs=[site.grad_output],
            grad_inputs=[site.grad_input],
            params=site.params,
            param_grads=site.param_grads,
            reads=reads,
            range=f"{chain.specs[site.rank].name}, {variant}, slot {slot}" if self._annotate else "",
        )
        self.num_graphs += 1 if site.backward is None else 2

    def suspend(self) -> None:
        """No replays until `resume()`: for hosts that move weights or free gradient storage."""
        self.core.become(_C.BankState.SUSPENDED)

    def resume(self) -> None:
        """Allows replays again."""
        self.core.become(_C.BankState.SEALED)

    def counters(self) -> dict[str, int]:
        """`calls`, `replays` and the eager calls of each reason; replays + eager == calls."""
        return self.core.counters()

    def pool_bytes(self) -> int:
        """Device memory that the graphs' pools hold."""
        return self.backend.pool_bytes()

    def release(self) -> None:
        """Drops every graph at once. Backward passes that are still pending raise from now on."""
        if self.state is not _C.BankState.RELEASED:
            self.backend.settle()
            self.core.release()
