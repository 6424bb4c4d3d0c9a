# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel overlap in one process: experts on one rank, and a stand-in for the all-to-all.

One rank's all-to-all hands back its input, which the nodes of a plan free. The stand-in copies, and can take
time on its stream, forward and backward: it shows what can lie under compute, and nothing of a network.
"""

import contextlib
import functools
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import record_function

import megagraph
from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import PART, Timeline, device_us
from benchmarks.subjects.hosts import check_replays, install, made_quickly
from benchmarks.subjects.packs import MICRO_BATCHES
from benchmarks.subjects.steps import StepCase, StepTrainer, expert_layers, without_collection

_STAND_IN = "spin_kernel"  # as the profiler names what `torch.cuda._sleep` runs
_CYCLES = 1 << 24  # some ten milliseconds
_PRODUCTS = re.compile("gemm|gemv|nvjet|xmma", re.IGNORECASE)  # kernels of matrix products, by their names


@functools.cache
def _cycles_per_us() -> float:
    """Of the device's clock while it is busy."""
    ((us,),) = device_us([lambda: torch.cuda._sleep(_CYCLES)], repeats=1)
    return _CYCLES / us


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


def copies_for_all_to_all(us: float = 0.0) -> contextlib.AbstractContextManager[Any]:
    """Inside, dispatchers copy. A copy of hidden states takes `us` more; probabilities travel beside them."""
    from megatron.core.transformer.moe import token_dispatcher

    def exchange(_group: Any, rows: Tensor, *_splits: Any, **_how: Any) -> Any:
        return _Exchange.apply(rows, us if rows.dim() > 1 else 0.0)  # type: ignore[no-untyped-call]

    return mock.patch.object(token_dispatcher, "all_to_all", exchange)


# -- what overlap costs and gains ------------------------------------------------------------------

WITHOUT, EAGER, GRAPHED = "no overlap", "overlap, eager", "overlap, graphed"  # in one process each
# The most that torch's allocator held, in the whole process and since the capture.
RESERVED, RESERVED_LATER = "peak memory reserved", "peak memory reserved by steps after the capture"
MEMORY = RESERVED, RESERVED_LATER
WARM_UP_STEPS = 6  # the fourth captures
ROUNDS = 4  # of each distinct step
# Of nodes of plans, and the methods that run them.
PASSES = {"forward": "_forward", "backward": "_backward", "weights": "backward_dw"}


class _OverlapTrainer(StepTrainer):
    """Times the host beside the wall of a step."""

    host_ms = 0.0

    def __init__(self, options: Any, *, overlaps: bool, delays: bool, is_fused: bool, **further: Any) -> None:
        self._overlaps, self._delays, self._is_fused = overlaps, delays, is_fused
        super().__init__(options, ddp={"delay_wgrad_compute": delays}, **further)

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        config.overlap_moe_expert_parallel_comm = self._overlaps  # which it refuses for one rank
        config.delay_wgrad_compute = self._delays
        chunk = super().make_chunk(config, spec)
        module: Any
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = self._is_fused
        return chunk

    def forward_backward(self, packs: Sequence[Any], *, forward_only: bool = False) -> list[Tensor]:
        waited, wait = 0.0, torch.cuda.Event.synchronize

        def synchronize(event: Any) -> None:
            """The host waits for events, as dispatchers do for numbers of rows."""
            nonlocal waited
            start = time.perf_counter()
            wait(event)
            waited += time.perf_counter() - start

        with mock.patch.object(torch.cuda.Event, "synchronize", synchronize):
            start = time.perf_counter()
            losses = super().forward_backward(packs, forward_only=forward_only)
            self.host_ms = (time.perf_counter() - start - waited) * 1e3
        return losses


@contextlib.contextmanager
def _parts_of_layers() -> Iterator[None]:
    """Passes of layers' nodes are parts of the step; those of a layer beside another have a number."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan as Layer
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    numbers, number, run = itertools.count(1), 0, Layer.run
    # Before the first plan there are none.
    kinds = [kind for kind in ScheduleNode.__subclasses__() if hasattr(kind, "backward_dw")]

    def numbered(f_layer: Any, b_layer: Any, *args: Any, **given: Any) -> Any:
        nonlocal number
        number = 0 if f_layer is None or b_layer is None else next(numbers)
        return run(f_layer, b_layer, *args, **given)

    def part(pass_of: Callable[..., Any], way: str) -> Callable[..., Any]:
        def noted(node: Any, *args: Any) -> Any:
            with record_function(f"{PART}{number} {node.name} {way}"):
                return pass_of(node, *args)

        return noted

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Layer, "run", staticmethod(numbered)))
        for kind, (way, name) in itertools.product(kinds, PASSES.items()):
            stack.enter_context(mock.patch.object(kind, name, part(getattr(kind, name), way)))
        yield


def _nodes_of(timeline: Timeline) -> dict[str, tuple[float, float]]:
    """From when to when passes of two layers' nodes ran, in the middle of the step, by name."""
    spans: dict[int, dict[str, list[float]]] = {}
    for work in timeline.work:
        number, _, name = work.part.partition(" ")
        if number.strip("0"):
            spans.setdefault(int(number), {}).setdefault(name, []).extend((work.start, work.end))
    if not spans:
        return {}
    nodes = spans[sorted(spans)[len(spans) // 2]]
    start = min(map(min, nodes.values()))
    return {name: (min(times) - start, max(times) - start) for name, times in nodes.items()}


def measure_overlap(
    case: StepCase,
    way: str,
    *,
    is_engine: bool,
    times_us: Sequence[float],
    scopes: Sequence[str],
    delays: bool = False,
    is_fused: bool = False,
) -> Answer:
    """Steps of experts of one rank, by the time that each all-to-all of hidden states takes.

    With `delays` gradients of weights are made later; if `is_fused` their products add to `main_grad`.
    Answers by such time, of each round: `walls`, and `host_us` of a micro-batch without the host's waits;
    `launches` of a micro-batch; matrix `products` of a step; the `share` of the all-to-alls' time under
    something else. And bytes of `memory`; with the last time when two layers' `nodes` ran, in us.
    """
    mode = "graph" if way == GRAPHED else "eager"
    install(capacities=(case.capacity,), cuda_graph_modules=tuple(scopes), mode=mode)
    kind: dict[str, Any] = {"overlaps": way != WITHOUT, "delays": delays, "is_fused": is_fused}
    trainer = made_quickly(_OverlapTrainer, case.model, **kind, **expert_layers(is_engine))
    steps = case.batches(trainer.device)
    walls: list[list[float]] = [[] for _ in times_us]
    host_us: list[list[float]] = [[] for _ in times_us]
    found: Answer = {"walls": walls, "host_us": host_us, "launches": [], "products": [], "share": []}
    with copies_for_all_to_all():
        trainer.walls_ms(steps, WARM_UP_STEPS)
    first = torch.cuda.max_memory_reserved()
    if torch.cuda.is_available():  # warm-up, capture and verification hold more than they leave
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with without_collection():  # by turns: hosts are slow for a while
        for batches, (place, us) in itertools.product(steps * ROUNDS, enumerate(times_us)):
            with copies_for_all_to_all(us):
                walls[place].append(trainer.wall_ms(batches, graphs=True))
            host_us[place].append(trainer.host_ms * 1e3 / MICRO_BATCHES)
    later = torch.cuda.max_memory_reserved()
    for us in times_us:
        with copies_for_all_to_all(us), _parts_of_layers():
            timeline = trainer.traced(steps[0])
        found["launches"].append(timeline.launches / MICRO_BATCHES)
        found["products"].append(sum(bool(_PRODUCTS.search(work.name)) for work in timeline.work))
        found["share"].append(timeline.share_beside(_STAND_IN) if us else 0.0)
    if way == GRAPHED:
        check_replays(megagraph.reports()[-1])
    memory = {RESERVED: max(first, later), RESERVED_LATER: later}
    return {**found, "memory": memory, "nodes": _nodes_of(timeline)}
