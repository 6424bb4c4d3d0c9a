# SPDX-License-Identifier: Apache-2.0
"""A whole training on a GPU: step time and memory.

Each measurement runs in a process of its own, so that memory is that of one model. Neither deterministic
algorithms nor filled memory, eager and graphed alike; tests/megatron/test_real_hosts.py compares the bits,
and counts allocations and synchronisations.
"""

from functools import partial
from statistics import median
from typing import Any

from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.clocks import device_work
from benchmarks.measuring.figures import Measurement, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import answer_ours, install_for, walls_ms
from benchmarks.subjects.packs import CASES, Case
from megagraph import megatron
from megagraph.demo.trainer import Trainer

TIMED_STEPS = 20
WARMUP_STEPS = 3
TIMEOUT_SECONDS = 600
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
MIB = 2**20


def measure_time(case: Case, *, graphs: bool) -> Answer:
    """Step times, memory and GPU time of one model."""
    install_for(case.model.max_tokens, *case.max_packed_seqs, cuda_graph_warmup_steps=WARMUP_STEPS)
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
    }


def figures_of(name: str, eager: Answer, graphed: Answer) -> list[Figure]:
    """The figures of one case."""
    report = graphed["report"]

    def figure(what: str, value: float, unit: str, **more: Any) -> Figure:
        return Figure(name=f"{name}: {what}", value=value, unit=unit, **more)

    def beside(what: str, key: str, unit: str, scale: float = 1, slack: float | None = None) -> Figure:
        its = eager[key] / scale
        bar = None if slack is None else slack * its
        return figure(what, graphed[key] / scale, unit, bar=bar, rival="eager", rival_value=its)

    peak, eager_ms = "peak memory reserved", median(eager["walls_ms"])
    rival = {"bar": eager_ms, "rival": "eager", "rival_value": eager_ms}
    return [
        timed(f"{name}: forward and backward of a step, median", graphed["walls_ms"], "ms", **rival),
        beside("GPU busy share", "busy_share", "1"),
        beside("kernel time of a step", "kernel_ms", "ms", slack=1.01),
        beside(peak, "reserved_bytes", "MiB", MIB, 1.05),
        beside(f"{peak}, with packs over the capacity", "reserved_with_eager_bytes", "MiB", MIB),
        figure("capture", 1e3 * report["capture_seconds"] / report["graphs"], "ms a graph", bar=40),
        figure("padding share", report["padding_share"], "1"),
    ]


def measure(measurement: Measurement) -> None:
    """Measures every case."""

    def measured(name: str) -> list[Figure]:
        ask = partial(measure_part, __name__, name, timeout=TIMEOUT_SECONDS, environment=ENVIRONMENT)
        return figures_of(name, ask("eager"), ask("graphed"))

    for name in CASES:
        measurement.take(name, partial(measured, name))


def answer(name: str, what: str) -> None:
    """A case, eager or graphed."""
    answer_ours(partial(measure_time, CASES[name], graphs=what == "graphed"))
