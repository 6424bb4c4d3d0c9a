# SPDX-License-Identifier: Apache-2.0
"""Captures one variant of one chain of sites into one slot: the capture plan.

Note [Capture plan]
All forwards are captured in execution order, then all backwards in reverse, and every tensor that
crosses a graph's edge is kept until the last one is done. So the slot's pool hands out its blocks
like a stack, which is what the nesting rule (csrc/bank/slot_ring.h) relies on; capturing forward
and backward together, layer by layer, corrupts a shared pool. A site's output tensor *is* the next
site's input, and the gradient of that input *is* the output's gradient: no copies in between.
"""

import contextlib
import pathlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.accumulators import swap_of, swapped
from megagraph.agreement import Exchange, GroupGaveUp, Verdict
from megagraph.backends import Backend
from megagraph.dispatch import EagerReason
from megagraph.restore import leaves_no_trace, main_grad_of, unfilled
from megagraph.rng import RngSources
from megagraph.sites import CaptureError, SiteSpec, VariantSpec

__all__ = ["CapturedSite", "Conditions", "Guard", "capture_variant", "warm_up_variant"]

# Entered around everything that runs in a capture, and around replays of the host backend.
Guard = Callable[[], contextlib.AbstractContextManager[None]]

_PACKAGE = str(pathlib.Path(__file__).parent)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What every capture of a bank runs under.

    Args:
        backend: where captures are recorded.
        rng: restored after each warm-up and capture.
        guard: entered around everything that runs.
        exchange: asks the ranks that share communicators, after each part.
    """

    backend: Backend
    rng: RngSources
    guard: Guard
    exchange: Exchange


@dataclass(kw_only=True)
class CapturedSite:
    """What one site captured: executables and boundary tensors."""

    rank: int
    forward: _C.Executable | None = None
    backward: _C.Executable | None = None
    input: Tensor | None = None
    output: Tensor | None = None
    grad_output: Tensor | None = None
    grad_input: Tensor | None = None
    # Of parameters without main_grad: their gradients are handed to autograd.
    params: list[nn.Parameter] = field(default_factory=list)
    param_grads: list[Tensor] = field(default_factory=list)
    # Parameters with main_grad, in the order in which the backward pass reached them.
    reached: list[nn.Parameter] = field(default_factory=list)


def _line_of(error: BaseException) -> str:
    """Where the error came up, in code outside torch and this package if there is any."""
    frames = list(traceback.extract_tb(error.__traceback__))
    torch_package = str(pathlib.Path(torch.__file__).parent)
    outside = [frame for frame in frames if not frame.filename.startswith((torch_package, _PACKAGE))]
    frame = (outside or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


class _Plan:
    """One capture of one variant into one slot."""

    def __init__(
        self,
        under: Conditions,
        sites: Sequence[SiteSpec],
        skipped: Mapping[int, EagerReason],
        variant: VariantSpec,
        pool: int,
        buffers: Mapping[str, Tensor],
    ) -> None:
        self._backend = under.backend
        self._guard = under.guard
        self._rng = under.rng
        self._exchange = under.exchange
        self._sites = sites
        self._variant = variant
        self._pool = pool
        self._arguments = variant.arguments(buffers)
        self._end = None if variant.end_buffer is None else buffers[variant.end_buffer]
        self._captured = {r: CapturedSite(rank=r) for r in range(len(sites)) if r not in skipped}
        # (leaf, output) of each site between its forward and its backward.
        self._open: dict[int, tuple[Tensor, Tensor]] = {}
        self._trace: _C.OpTrace | None = _C.OpTrace()

    def end(self) -> None:
        """Stops watching ops: executables of the host backend keep this plan for their bodies."""
        self._trace = None

    @contextlib.contextmanager
    def _named(self, rank: int, phase: str) -> Iterator[None]:
        """Turns what goes wrong inside, here or on another rank, into a CaptureError that says where."""
        try:
            yield
        except GroupGaveUp:
            raise
        except CaptureError as error:
            if error.reason is not EagerReason.GROUP_DISAGREED:  # the others have told this rank
                self._tell(Verdict.FAILED)
            raise
        except Exception as error:
            self._tell(Verdict.FAILED)
            raise CaptureError(
                site=self._sites[rank].name,
                rank=rank,
                reason=EagerReason.CAPTURE_FAILED,
                detail=f"{phase} failed at {_line_of(error)}, last op {self._last_op()}: "
                f"{type(error).__name__}: {error}",
            ) from error
        self._meet(rank, phase)

    def _meet(self, rank: int, phase: str) -> None:
        """Goes on where every rank of the group can."""
        if self._tell(Verdict.FINE) is Verdict.FAILED:
            raise CaptureError(
                site=self._sites[rank].name,
                rank=rank,
                reason=EagerReason.GROUP_DISAGREED,
                detail=f"{phase} failed on another rank of the group",
            )

    def _tell(self, verdict: Verdict) -> Verdict:
        """The worst verdict of the group on what every rank has just tried."""
        worst = Verdict(self._exchange([verdict])[0])
        if worst is Verdict.GAVE_UP:
            raise GroupGaveUp
        return worst

    def _last_op(self) -> str:
        return (self._trace.last_op if self._trace is not None else "") or "none"

    def _empty_rows(self) -> Tensor:
        shape = (self._variant.rows, *self._variant.row_shape)
        with unfilled():
            return torch.empty(shape, dtype=self._variant.dtype, device=self._backend.device)

    def warm_up(self) -> None:
        """Runs every site once, forward and backward, on memory of its own."""
        generator = torch.Generator(self._backend.device).manual_seed(0)
        x = self._empty_rows().uniform_(-1, 1, generator=generator)
        for rank in self._captured:
            site = self._sites[rank]
            before = self._rng.snapshot()
            with self._named(rank, "warm-up"):
                self._meet(rank, "warm-up")  # a rank that got no further enters no collective
                with leaves_no_trace([site], work_runs=True), self._guard():
                    y = self._run_once(rank, x)
                if self._rng.drew_unsafely(before):
                    raise CaptureError(
                        site=site.name,
                        rank=rank,
                        reason=EagerReason.RNG_NOT_GRAPH_SAFE,
                        detail="draws random numbers from a stream that no graph can advance",
                    )
            x = y.detach()

    def _run_once(self, rank: int, x: Tensor) -> Tensor:
        site, training = self._sites[rank], self._variant.training
        with swapped(swap_of(site, training)), torch.set_grad_enabled(training):
            y = site.call(x.detach().requires_grad_(training), **self._arguments)
            # A rank that failed by now takes no part in the backward's collectives.
            self._meet(rank, "warm-up of the forward")
            if training:
                torch.autograd.backward(y, torch.ones_like(y))
        if y.shape[:1] != x.shape[:1]:
            raise ValueError(f"expected an output of {x.shape[0]} rows, got {tuple(y.shape)}")
        return y

    def record(self) -> list[CapturedSite]:
        """Captures as Note [Capture plan] says."""
        reached: dict[int, dict[nn.Parameter, None]] = {rank: {} for rank in self._captured}
        training = self._variant.training
        swaps = {rank: swap_of(self._sites[rank], training, reached[rank]) for rank in self._captured}
        for rank, captured in self._captured.items():
            with self._named(rank, "capture of the forward"):
                captured.forward = self._backend.record(self._pool, self._forward(rank, swaps[rank]))
        if self._variant.training:
            for rank, captured in reversed(self._captured.items()):
                with self._named(rank, "capture of the backward"):
                    captured.backward = self._backend.record(self._pool, self._backward(rank, swaps[rank]))
                captured.reached = list(reached[rank])
        return list(self._captured.values())

    def _forward(self, rank: int, swap: _C.AccumulatorSwap) -> Callable[[], None]:
        site, captured, training = self._sites[rank], self._captured[rank], self._variant.training

        def body() -> None:
            if captured.input is None:
                before = self._captured.get(rank - 1)
                captured.input = self._empty_rows() if before is None else before.output
            assert captured.input is not None
            x = captured.input.detach().requires_grad_(training)
            with swapped(swap), self._guard(), torch.set_grad_enabled(training):
                y = site.call(x, **self._arguments)
            captured.output = self._backend.keep(captured.output, y)
            if training:
                self._open[rank] = x, y

        return body

    def _backward(self, rank: int, swap: _C.AccumulatorSwap) -> Callable[[], None]:
        captured = self._captured[rank]

        def body() -> None:
            if captured.grad_output is None:
                after = self._captured.get(rank + 1)
                assert captured.output is not None
                with unfilled():
                    captured.grad_output = (
                        torch.empty_like(captured.output) if after is None else after.grad_input
                    )
            x, y = self._open.pop(rank)
            with swapped(swap), self._guard():
                torch.autograd.backward(y, captured.grad_output)
            if x.grad is None:
                raise ValueError("expected a gradient of the hidden states, got none")
            captured.grad_input = self._backend.keep(captured.grad_input, x.grad)
            if self._end is not None and rank == 0:
                torch.ops.megagraph.zero_tail_([captured.grad_input], self._end)
            self._keep_param_grads(rank, swap)

        return body

    def _keep_param_grads(self, rank: int, swap: _C.AccumulatorSwap) -> None:
        captured = self._captured[rank]
        kept = [param for param in self._sites[rank].trainable() if main_grad_of(param) is None]
        got = [
            (param, grad)
            for param, grad in zip(kept, swap.take_kept_grads(), strict=True)
            if grad is not None
        ]
        if not captured.param_grads:
            captured.params = [param for param, _ in got]
            captured.param_grads = [self._backend.keep(None, grad) for _, grad in got]
        else:
            for buffer, (_, grad) in zip(captured.param_grads, got, strict=True):
                self._backend.keep(buffer, grad)


def warm_up_variant(
    under: Conditions,
    sites: Sequence[SiteSpec],
    skipped: Mapping[int, EagerReason],
    variant: VariantSpec,
    buffers: Mapping[str, Tensor],
) -> None:
    """Runs every site that is not skipped once, and leaves no trace of it.

    Libraries make their handles and choose their kernels here, where it is allowed.

    Args:
        under: the bank's conditions.
        sites: the chain, in execution order.
        skipped: ranks that stay eager.
        variant: what to run for.
        buffers: metadata buffers by name, filled with their examples.

    Raises:
        CaptureError: naming the site, the op and the line.
    """
    with _plan(under, sites, skipped, variant, 0, buffers) as plan:
        plan.warm_up()


def capture_variant(
    under: Conditions,
    sites: Sequence[SiteSpec],
    skipped: Mapping[int, EagerReason],
    variant: VariantSpec,
    pool: int,
    buffers: Mapping[str, Tensor],
) -> list[CapturedSite]:
    """Captures every site that is not skipped, after its warm-up, and leaves no trace of it.

    Args:
        under: the bank's conditions.
        sites: the chain, in execution order.
        skipped: ranks that stay eager.
        variant: what to capture for.
        pool: the slot's pool.
        buffers: the slot's metadata buffers by name, filled with their examples.

    Returns:
        The captured sites. On a GPU the boundaries are still owned by the pool tensors in them.

    Raises:
        CaptureError: naming the site, the op and the line. Everything has been undone.
    """
    traced = [site for rank, site in enumerate(sites) if rank not in skipped]
    with (
        _plan(under, sites, skipped, variant, pool, buffers) as plan,
        leaves_no_trace(traced, work_runs=under.backend.runs_while_recording),
    ):
        return plan.record()


@contextlib.contextmanager
def _plan(
    under: Conditions,
    sites: Sequence[SiteSpec],
    skipped: Mapping[int, EagerReason],
    variant: VariantSpec,
    pool: int,
    buffers: Mapping[str, Tensor],
) -> Iterator[_Plan]:
    snapshot = under.rng.snapshot()
    plan = _Plan(under, sites, skipped, variant, pool, buffers)
    try:
        with under.backend.recording():
            yield plan
    finally:
        plan.end()
        under.rng.restore(snapshot)
