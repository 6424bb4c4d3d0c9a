# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel overlap in one process: experts on one rank, and a stand-in for the all-to-all.

One rank's all-to-all hands back its input, which the nodes of a plan free. The stand-in copies, and can take
time on its stream, forward and backward: it shows what can lie under compute, and nothing of a network.
"""

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import megagraph
from benchmarks.measuring.children import Answer
from benchmarks.subjects.hosts import check_replays, install
from benchmarks.subjects.packs import MICRO_BATCHES
from benchmarks.subjects.steps import Schedule, StepCase, StepTrainer, expert_layers, without_collection

_STAND_IN = "spin_kernel"  # as the profiler names what `torch.cuda._sleep` runs
_CYCLES = 1 << 24  # some ten milliseconds


@functools.cache
def _cycles_per_us() -> float:
    """Of the device's clock while it is busy."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CYCLES)
    start.record()
    torch.cuda._sleep(_CYCLES)
    end.record()
    end.synchronize()
    return _CYCLES / (float(start.elapsed_time(end)) * 1e3)


def keep_busy(us: float) -> None:
    """Occupies the current stream; does nothing where there is no GPU."""
    if us and torch.cuda.is_available():
        torch.cuda._sleep(int(us * _cycles_per_us()))


class _Exchange(torch.autograd.Function):
    """A copy that takes its time; so does that of the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, us: float) -> Tensor:
        ctx.us = us
        keep_busy(us)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        keep_busy(ctx.us)
        return grad.clone(), None


@contextlib.contextmanager
def copies_for_all_to_all(us: float = 0.0) -> Iterator[None]:
    """Inside, dispatchers copy. A copy of hidden states takes `us` more; probabilities travel beside them."""
    from megatron.core.transformer.moe import token_dispatcher

    def exchange(_group: Any, rows: Tensor, *_splits: Any, **_how: Any) -> Any:
        return _Exchange.apply(rows, us if rows.dim() > 1 else 0.0)  # type: ignore[no-untyped-call]

    with mock.patch.object(token_dispatcher, "all_to_all", exchange):
        yield


# -- what overlap costs and gains ------------------------------------------------------------------

WITHOUT, EAGER, GRAPHED = "no overlap", "overlap, eager", "overlap, graphed"  # in one process each
# What memory is of: the most that torch's allocator held, in the whole process and since the capture; and of
# the latter what tensors took.
RESERVED, RESERVED_LATER = "peak memory reserved", "peak memory reserved by steps after the capture"
ALLOCATED, POOLS = "peak memory of tensors outside of graphs in these", "pools of the graphs"
MEMORY = RESERVED, RESERVED_LATER, ALLOCATED, POOLS
WARM_UP_STEPS = 6  # the fourth captures
ROUNDS = 4  # of each distinct step


class _OverlapTrainer(StepTrainer):
    """Times the host beside the wall of a step."""

    def __init__(self, options: Any, *, overlaps: bool, **further: Any) -> None:
        self._overlaps, self.host_ms = overlaps, 0.0
        super().__init__(options, wrap=self._on_host, **further)

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        config.overlap_moe_expert_parallel_comm = self._overlaps  # which it refuses for one rank
        return super().make_chunk(config, spec)

    def _on_host(self, schedule: Schedule) -> Schedule:
        def on_host(**arguments: Any) -> Any:
            with _waits() as waited:
                start = time.perf_counter()
                results = schedule(**arguments)
                self.host_ms = (time.perf_counter() - start - sum(waited)) * 1e3
            return results

        return on_host


@contextlib.contextmanager
def _waits() -> Iterator[list[float]]:
    """Collects the seconds in which the host waits for events, as dispatchers do for numbers of rows."""
    waited, wait = list[float](), torch.cuda.Event.synchronize

    def synchronize(event: Any) -> None:
        start = time.perf_counter()
        wait(event)
        waited.append(time.perf_counter() - start)

    with mock.patch.object(torch.cuda.Event, "synchronize", synchronize):
        yield waited


def measure_overlap(
    case: StepCase, way: str, *, is_engine: bool, times_us: Sequence[float], scopes: Sequence[str]
) -> Answer:
    """Steps of experts of one rank, by the time that each all-to-all of hidden states takes.

    Answers lists of each such time: of its rounds `walls` and times of the host without its waits, `host_us`
    of a micro-batch; its `launches` of a micro-batch; the `share` of the all-to-alls' time beside which
    something else runs, 0 where they take none. And bytes of `memory`, by what they are of.
    """
    mode = "graph" if way == GRAPHED else "eager"
    install(capacities=(case.capacity,), cuda_graph_modules=tuple(scopes), mode=mode)
    trainer = _OverlapTrainer(case.model, overlaps=way != WITHOUT, **expert_layers(is_engine))
    steps = case.batches(trainer.device)
    found: Answer = {"walls": [], "host_us": [], "launches": [], "share": []}
    with copies_for_all_to_all():
        trainer.walls_ms(steps, range(WARM_UP_STEPS))
    first = torch.cuda.max_memory_reserved()
    if torch.cuda.is_available():  # warm-up, capture and verification hold more than they leave
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for us in times_us:
        with copies_for_all_to_all(us), without_collection():
            walls, host_us = [], []
            for index in case.rounds(ROUNDS * len(steps)):
                walls.append(trainer.wall_ms(steps[index], graphs=True))
                host_us.append(trainer.host_ms * 1e3 / MICRO_BATCHES)
        found["walls"].append(walls)
        found["host_us"].append(host_us)
    later, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    memory = {RESERVED: max(first, later), RESERVED_LATER: later, ALLOCATED: allocated}
    for us in times_us:
        with copies_for_all_to_all(us):
            timeline = trainer.traced(steps[0])
        found["launches"].append(timeline.launches / MICRO_BATCHES)
        found["share"].append(timeline.share_beside(_STAND_IN) if us else 0.0)
    if way == GRAPHED:
        report = megagraph.reports()[-1]
        check_replays(report)
        memory[POOLS] = report["pool_bytes"]
    return {**found, "memory": memory}
