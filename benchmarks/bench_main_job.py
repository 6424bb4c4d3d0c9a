# SPDX-License-Identifier: Apache-2.0
"""The main job on a GPU: bits, step time, memory, allocations and synchronisations.

Each measurement runs in a process of its own (`python -m benchmarks.bench_main_job CASE WHAT`), so that
memory is that of one model. Timed runs use neither deterministic algorithms nor filled memory,
eager and graphed alike; the comparison of bits uses deterministic algorithms.
"""

import json
import os
import sys
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.hosts.run_jobs import comparison_of
from benchmarks.measuring.publish import Measurement
from benchmarks.measuring.run_children import measure_part
from benchmarks.packs.cases import CASES, Case
from megagraph import megatron, results
from megagraph.cli.demo import quiet_megatron
from megagraph.config import GraphConfig
from megagraph.demo.compare import compare_steps, time_steps
from megagraph.demo.trainer import Trainer, process_groups
from megagraph.megatron.patch.installation import installed_plugin

COMPARED_STEPS = 104
TIMED_STEPS = 20
WARMUP_STEPS = 3
TIMEOUT_SECONDS = 600
REPLAYED_MICRO_BATCHES = 84  # of 24 layers, forward and backward: more than 4,000 replays

_MODULE = "benchmarks.bench_main_job"

# Runtime and driver calls that wait for the device.
_WAITING = (
    "StreamSynchronize",
    "DeviceSynchronize",
    "EventSynchronize",
    "CtxSynchronize",
    "cudaMalloc",
    "cudaFree",
)


def _install(case: Case) -> None:
    megatron.install(
        GraphConfig(
            cuda_graph_max_packed_seqs=case.max_packed_seqs,
            max_seqlen_per_dp_cp_rank=case.model.max_tokens,
            cuda_graph_warmup_steps=WARMUP_STEPS,
            progress=False,
        )
    )


def measure_bits(case: Case) -> dict[str, Any]:
    """Trains eager and graphed from the same weights and compares every bit."""
    torch.use_deterministic_algorithms(True)
    eager, graphed = Trainer(case.model), Trainer(case.model)
    agreement = compare_steps(eager, graphed, case.steps(COMPARED_STEPS))
    report = megatron.reports()[-1]
    over = [reason for reason in report["eager"] if reason.startswith(("TOO_", "SEQUENCE_"))]
    return {
        "differences": agreement.differences,
        "steps": agreement.steps,
        "report": report,
        "over_capacity": sum(report["eager"][reason] for reason in over) // report["layers"],
    }


def measure_time(case: Case, *, graphs: bool) -> dict[str, Any]:
    """Step time, memory and GPU time of one model."""
    trainer = Trainer(case.model)
    steps = case.steps(WARMUP_STEPS + 3 + TIMED_STEPS)
    fitting = [[pack for pack in step if pack.num_seqs <= max(case.max_packed_seqs)] for step in steps]
    time_steps(trainer, fitting[: WARMUP_STEPS + 3], graphs=graphs)
    reserved = torch.cuda.max_memory_reserved()
    times = time_steps(trainer, steps[WARMUP_STEPS + 3 :], graphs=graphs)
    figures: dict[str, Any] = {
        "median_ms": times.median_ms,
        "fastest_ms": times.fastest_ms,
        "reserved_bytes": reserved,
        "reserved_with_eager_bytes": torch.cuda.max_memory_reserved(),
        "report": megatron.reports()[-1],
    }
    profiled = steps[-2:]  # the busy share is that of these steps, timed without the profiler first
    wall_ms = time_steps(trainer, profiled * 3, graphs=graphs).median_ms
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as trace:
        time_steps(trainer, profiled, graphs=graphs)
    kernels_us = sum(event.device_time_total for event in trace.events() if event.device_type.name == "CUDA")
    figures["kernel_ms"] = kernels_us / 1e3 / len(profiled)
    figures["busy_share"] = figures["kernel_ms"] / wall_ms
    if graphs:
        figures |= _measure_replays(trainer)
    return figures


def _measure_replays(trainer: Trainer) -> dict[str, Any]:
    """Allocations and waits of the plugin alone: captured layers, forward and backward."""
    plugin = installed_plugin()
    assert plugin is not None
    graphs = plugin.all_graphs()[0]
    chain = graphs.block.chain
    variants: list[Any] = list(chain.variants)
    key = next(key for key in variants if key[1].grad)
    capacity = key[0]
    shape = (capacity.tokens, 1, trainer.options.hidden)
    leaf = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    hidden = leaf.clone()  # the gradient of a leaf is cloned, that of the embedding's output is not
    grad = torch.randn_like(leaf)
    offsets = torch.tensor([0, capacity.tokens], dtype=torch.int32, device="cuda")
    trainer.model.zero_grad_buffer()

    def replay() -> None:
        with chain.micro_batch(key, [offsets]) as reason:
            assert reason is None, reason
            out = chain(hidden)
        torch.autograd.grad(out, hidden, grad)

    replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(REPLAYED_MICRO_BATCHES):
            replay()
    waiting = [event.name for event in trace.events() if any(name in event.name for name in _WAITING)]
    return {
        "replays": REPLAYED_MICRO_BATCHES * 2 * len(chain.sites),
        "allocations": torch.cuda.memory_stats()["allocation.all.allocated"] - before,
        "synchronisations": len(waiting) - 1,  # the profiler itself waits once, when it stops
    }


def run() -> None:
    """Measures every case and writes benchmarks/results/main_job.json."""
    compared: list[dict[str, Any]] = []

    def measured(case: Case) -> list[results.Figure]:
        bits = measure_part(_MODULE, case.name, "bits", timeout=TIMEOUT_SECONDS)
        compared.append({**bits, "reports": [bits["report"]]})
        eager, graphed = (
            measure_part(_MODULE, case.name, what, timeout=TIMEOUT_SECONDS) for what in ("eager", "graphed")
        )
        return figures_of(case.name, bits, eager, graphed)

    measurement = Measurement("main_job")
    for name, case in CASES.items():
        measurement.take(name, partial(measured, case))
    measurement.publish(comparison_of(compared))


def figures_of(
    name: str, bits: dict[str, Any], eager: dict[str, Any], graphed: dict[str, Any]
) -> list[results.Figure]:
    """The figures of one case."""
    report = graphed["report"]

    def figure(what: str, value: float, unit: str, **more: Any) -> results.Figure:
        return results.Figure(name=f"{name}: {what}", value=value, unit=unit, **more)

    return [
        figure("packs over the capacity, run eager", bits["over_capacity"], "packs", bar=3, better="higher"),
        figure(
            "forward and backward of a step, median",
            graphed["median_ms"],
            "ms",
            bar=eager["median_ms"],
            rival="eager",
            rival_value=eager["median_ms"],
        ),
        figure(
            "GPU busy share",
            graphed["busy_share"],
            "1",
            rival="eager",
            rival_value=eager["busy_share"],
        ),
        figure(
            "kernel time of a step",
            graphed["kernel_ms"],
            "ms",
            bar=1.01 * eager["kernel_ms"],
            rival="eager",
            rival_value=eager["kernel_ms"],
        ),
        figure(
            "peak memory reserved",
            graphed["reserved_bytes"] / 2**20,
            "MiB",
            bar=1.05 * eager["reserved_bytes"] / 2**20,
            rival="eager",
            rival_value=eager["reserved_bytes"] / 2**20,
        ),
        figure(
            "peak memory reserved, with packs over the capacity",
            graphed["reserved_with_eager_bytes"] / 2**20,
            "MiB",
            rival="eager",
            rival_value=eager["reserved_with_eager_bytes"] / 2**20,
        ),
        figure("capture", 1e3 * report["capture_seconds"] / report["graphs"], "ms a graph", bar=40),
        figure("padding share", report["padding_share"], "1"),
        figure(f"allocations in {graphed['replays']} replays", graphed["allocations"], "allocations", bar=0),
        figure(
            f"synchronisations in {graphed['replays']} replays", graphed["synchronisations"], "calls", bar=0
        ),
    ]


def _measure(case_name: str, what: str) -> None:
    quiet_megatron()
    case = CASES[case_name]
    with process_groups():
        _install(case)
        measured = measure_bits(case) if what == "bits" else measure_time(case, graphs=what == "graphed")
        megatron.uninstall()
    print(json.dumps(measured))


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    _measure(*sys.argv[1:])
