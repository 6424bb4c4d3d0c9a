# SPDX-License-Identifier: Apache-2.0
"""Where recorded work runs: CUDA graphs, or the host backend that runs the callable again.

Knows nothing of sites and plans.
"""

from __future__ import annotations  # a CPU-only build has no PoolHold

import contextlib
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeAlias

import torch

from megagraph import _C

__all__ = ["SCRATCH", "Backend", "CudaBackend", "KeptMemoryError", "Lent", "backend_for"]

Generators = Callable[[], Sequence[torch.Generator]]
Work = Callable[[], None]
# Of a pass: its own pool, that of what is gone by `give_back`, that in which it frees what its forward kept.
PassPools: TypeAlias = tuple[int, int, int]
SCRATCH = -1  # the pool that slots share
# Entered around work on the backend's stream that is to get memory of a pool.
Lent = Callable[[], contextlib.AbstractContextManager[None]]


class KeptMemoryError(RuntimeError):
    """Somebody keeps memory that graphs will write over."""


class Backend:
    """Records a body of work over static buffers, and returns what replays it.

    This one runs the body again on the static buffers, on the CPU. Claims no speed, shows no pool hazard.
    """

    runs_while_recording = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def add_pools(self, number: int) -> list[_C.PoolHold]:
        """Makes memory pools, several for several slots; returns what keeps them alive. The host has none."""
        return []

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """The stream on which everything of a warm-up and a capture happens."""
        return contextlib.nullcontext()

    def learning(self) -> contextlib.AbstractContextManager[tuple[int, _C.SlotMemory] | None]:
        """A pool for one capture of a variant, given back afterwards, and what it learns; or None."""
        return contextlib.nullcontext()

    def reserve(self, pool: int, num_bytes: int) -> None:
        """Has a pool hold a block of so many bytes, before its first pass; `SCRATCH` if it holds none."""

    def record(
        self, pools: PassPools, body: Work, memory: _C.PassMemory | None, give_back: Work
    ) -> _C.Executable:
        """Records `body` into a pool; of the pass's `memory` slots share what is temporary.

        Then calls `give_back`.
        """
        body()
        give_back()
        return _C.make_host_executable(body)

    def note(self, slot_pool: int) -> _C.PoolNote | None:
        """Which memory of a single slot's pool is taken, between two captures."""
        return None

    def lend(self, slot_pool: int, note: _C.PoolNote | None) -> contextlib.AbstractContextManager[Lent]:
        """Lends memory of a single slot's pool, that was free at the note, to work that is not captured.

        Inside of `recording()`. Without a note, or where it cannot be lent, the work gets memory of its own.
        Raises `KeptMemoryError` where some of it is still in use afterwards.
        """
        return contextlib.nullcontext(contextlib.nullcontext)

    def collect(self, generation: int = 2) -> None:
        """Before a capture: ends what only a garbage collector would find, and then in the middle of it.

        After one, generation 0 is all that has been made since: a quarter of a second less.
        """

    def settle(self) -> None:
        """Waits for the device and returns unused memory; once before and once after a capture."""

    def pool_bytes(self) -> int:
        """Device memory that all pools hold, and an equal share of what is shared with others."""
        return 0


class CudaBackend(Backend):
    """Captures CUDA graphs on one process-wide side stream, into one private pool for each slot.

    Where there are several slots what is temporary comes from a pool that all backends of the device share
    (csrc/torch/pass_memory.h, Note [Scratch]). `generators` is asked at each capture for what its work may
    draw from beside the device's default generator; each must be safe under capture.
    """

    runs_while_recording = False
    # By device. The pool is gone with the last of them and the graphs over it.
    _sharing: ClassVar[defaultdict[int, weakref.WeakSet[CudaBackend]]] = defaultdict(weakref.WeakSet)

    def __init__(self, device: torch.device, generators: Generators = tuple) -> None:
        if not _C.WITH_CUDA:
            raise RuntimeError(
                f"megagraph was built without a CUDA compiler and cannot capture on {device}: install "
                "the CUDA toolkit (nvcc), then reinstall megagraph"
            )
        super().__init__(device)
        self._generators = generators
        self._stream = torch.cuda.ExternalStream(_C.capture_stream(device.index), device=device)
        self._pools: list[tuple[int, int]] = []
        self._scratch: _C.PoolHold | None = None

    def add_pools(self, number: int) -> list[_C.PoolHold]:
        if number > 1 and self._scratch is None:
            index = self.device.index
            scratch = next((it._scratch for it in self._sharing[index]), None)
            self._scratch = scratch or _C.PoolHold(index, torch.cuda.graph_pool_handle())
            self._sharing[index].add(self)
        pools = [torch.cuda.graph_pool_handle() for _ in range(number)]
        self._pools += pools
        return [_C.PoolHold(self.device.index, pool) for pool in pools]

    @contextlib.contextmanager
    def learning(self) -> Iterator[tuple[int, _C.SlotMemory] | None]:
        if self._scratch is None:
            yield None
            return
        holds = self.add_pools(1)
        try:
            yield len(self._pools) - 1, _C.SlotMemory()
        finally:
            self._pools.pop()
            holds.clear()
            self.settle()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)

    def reserve(self, pool: int, num_bytes: int) -> None:
        if pool != SCRATCH:
            _C.reserve(self.device.index, self._pools[pool], num_bytes)
        elif self._scratch is not None and not _C.held_bytes(self._scratch.pool):
            _C.reserve(self.device.index, self._scratch.pool, num_bytes)

    def record(
        self, pools: PassPools, body: Work, memory: _C.PassMemory | None, give_back: Work
    ) -> _C.Executable:
        scratch, of = None if memory is None else self._scratch, [self._pools[at] for at in pools]
        return _C.capture_work(of, self._generators(), scratch, memory, body, give_back)

    def note(self, slot_pool: int) -> _C.PoolNote | None:
        # Of several slots none has room for what is temporary, and what they share has none for the rest: in
        # a loan it would grow for good.
        return None if self._scratch is not None else _C.take_note(self.device.index, self._pools[slot_pool])

    @contextlib.contextmanager
    def lend(self, slot_pool: int, note: _C.PoolNote | None) -> Iterator[Lent]:
        pool = self._pools[slot_pool]
        loan = None if note is None else _C.PoolLoan(self.device.index, pool, note)
        if loan is None or not loan.is_open:
            yield contextlib.nullcontext
            return
        try:
            yield lambda: loan
        finally:
            loan.close()
        # Not after an error, whose traceback keeps what its frames hold.
        if _C.taken_bytes(pool):
            gc.collect()
            self.settle()
            if taken := _C.taken_bytes(pool):
                raise KeptMemoryError(f"{taken} bytes that were lent are still in use")

    def collect(self, generation: int = 2) -> None:
        gc.collect(generation)  # events and memory must not be freed on a stream that is being captured

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def pool_bytes(self) -> int:
        users = len(self._sharing[self.device.index])
        shared = 0 if self._scratch is None else _C.held_bytes(self._scratch.pool) // users
        return shared + sum(map(_C.held_bytes, self._pools))


def backend_for(device: torch.device, generators: Generators = tuple) -> Backend:
    """The backend of a device. Raises `RuntimeError` if this build has none for it."""
    if device.type == "cpu":
        return Backend(device)
    if device.type == "cuda":
        return CudaBackend(device, generators)
    raise RuntimeError(f"graphs need a CUDA device or the CPU's host backend, got {device}")
