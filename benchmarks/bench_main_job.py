# SPDX-License-Identifier: Apache-2.0
"""The main job on a GPU: step time, memory, allocations and synchronisations.

Each measurement runs in a process of its own, so that memory is that of one model. Neither deterministic
algorithms nor filled memory, eager and graphed alike; tests/megatron/test_real_hosts.py compares the bits.
"""

from functools import partial
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.figures import timed
from benchmarks.measuring.kernels import device_work
from benchmarks.measuring.publish import Measurement
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import answer_ours, install_for, walls_ms
from benchmarks.subjects.inside import Replays
from benchmarks.subjects.packs import CASES, Case
from megagraph import megatron
from megagraph.demo.trainer import Trainer

TIMED_STEPS = 20
WARMUP_STEPS = 3
TIMEOUT_SECONDS = 600
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
REPLAYED_MICRO_BATCHES = 84  # of 24 layers, forward and backward: more than 4,000 replays
MIB = 2**20


# Runtime and driver calls that wait for the device.
_WAITING = (
    *("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "CtxSynchronize"),
    *("cudaMalloc", "cudaFree"),
)


def measure_time(case: Case, *, graphs: bool) -> Answer:
    """Step times, memory and GPU time of one model."""
    trainer = Trainer(case.model)
    steps = case.steps(WARMUP_STEPS + 3 + TIMED_STEPS)
    fitting = [[pack for pack in step if pack.num_seqs <= max(case.max_packed_seqs)] for step in steps]
    _, reserved = walls_ms(trainer, fitting[: WARMUP_STEPS + 3], graphs=graphs)
    walls, most = walls_ms(trainer, steps[WARMUP_STEPS + 3 :], graphs=graphs)
    report = megatron.reports()[-1]
    profiled = steps[-2:]  # the busy share is that of these steps, timed without the profiler first
    wall_ms = median(walls_ms(trainer, profiled * 3, graphs=graphs)[0])
    work = device_work(partial(walls_ms, trainer, profiled, graphs=graphs), repeats=1, warm_up=0)
    kernel_ms = sum(item.us for item in work) / 1e3 / len(profiled)
    return {
        **{"walls_ms": walls, "reserved_bytes": reserved, "reserved_with_eager_bytes": most},
        **{"report": report, "kernel_ms": kernel_ms, "busy_share": kernel_ms / wall_ms},
        **(_measure_replays(trainer) if graphs else {}),
    }


def _measure_replays(trainer: Trainer) -> Answer:
    """Allocations and waits of the plugin alone: captured layers, forward and backward."""
    replays = Replays(trainer)
    trainer.model.zero_grad_buffer()

    def replay() -> None:
        with replays.micro_batch():
            out = replays.chain(replays.hidden)
        torch.autograd.grad(out, replays.hidden, replays.grad)

    replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(REPLAYED_MICRO_BATCHES):
            replay()
    waiting = [event.name for event in trace.events() if any(name in event.name for name in _WAITING)]
    return {
        "replays": REPLAYED_MICRO_BATCHES * 2 * len(replays.chain.sites),
        "allocations": torch.cuda.memory_stats()["allocation.all.allocated"] - before,
        "synchronisations": len(waiting) - 1,  # the profiler itself waits once, when it stops
    }


def figures_of(name: str, eager: Answer, graphed: Answer) -> list[Figure]:
    """The figures of one case."""
    report, replays = graphed["report"], graphed["replays"]

    def figure(what: str, value: float, unit: str, **more: Any) -> Figure:
        return Figure(name=f"{name}: {what}", value=value, unit=unit, **more)

    def beside(what: str, key: str, unit: str, scale: float = 1, slack: float | None = None) -> Figure:
        its = eager[key] / scale
        bar = None if slack is None else slack * its
        return figure(what, graphed[key] / scale, unit, bar=bar, rival="eager", rival_value=its)

    with_eager = "peak memory reserved, with packs over the capacity"
    eager_ms = median(eager["walls_ms"])
    rival = {"bar": eager_ms, "rival": "eager", "rival_value": eager_ms}
    return [
        timed(f"{name}: forward and backward of a step, median", graphed["walls_ms"], "ms", **rival),
        beside("GPU busy share", "busy_share", "1"),
        beside("kernel time of a step", "kernel_ms", "ms", slack=1.01),
        beside("peak memory reserved", "reserved_bytes", "MiB", MIB, 1.05),
        beside(with_eager, "reserved_with_eager_bytes", "MiB", MIB),
        figure("capture", 1e3 * report["capture_seconds"] / report["graphs"], "ms a graph", bar=40),
        figure("padding share", report["padding_share"], "1"),
        figure(f"allocations in {replays} replays", graphed["allocations"], "allocations", bar=0),
        figure(f"synchronisations in {replays} replays", graphed["synchronisations"], "calls", bar=0),
    ]


def measure(measurement: Measurement) -> None:
    """Measures every case."""

    def measured(name: str) -> list[Figure]:
        how: dict[str, Any] = {"timeout": TIMEOUT_SECONDS, "environment": ENVIRONMENT}
        eager, graphed = (measure_part(__name__, name, what, **how) for what in ("eager", "graphed"))
        return figures_of(name, eager, graphed)

    for name in CASES:
        measurement.take(name, partial(measured, name))


def answer(name: str, what: str) -> None:
    """A case, eager or graphed."""
    case = CASES[name]

    def measured() -> Answer:
        install_for(case.model.max_tokens, *case.max_packed_seqs, cuda_graph_warmup_steps=WARMUP_STEPS)
        return measure_time(case, graphs=what == "graphed")

    answer_ours(measured)
