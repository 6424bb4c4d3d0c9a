# SPDX-License-Identifier: Apache-2.0
"""Runs jobs of `measure_job` in processes of their own, and adds up how their bits compared."""

from collections.abc import Sequence
from typing import Any

from benchmarks.hosts.measure_job import JOBS
from benchmarks.measuring.compare import Answer
from benchmarks.measuring.run_children import Ended, measure_part, run_module, try_part
from megagraph import results

TIMEOUT_SECONDS = 300
_MODULE = "benchmarks.hosts.measure_job"


def _arrangement(name: str, gpus: str) -> dict[str, Any]:
    """How the processes of a job are started, each rank on one of the GPUs."""
    ranks = JOBS[name].ranks
    many = ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return {
        "launcher": many if ranks > 1 else (),
        "environment": {
            "CUDA_VISIBLE_DEVICES": gpus,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it with sequence parallelism
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "OMP_NUM_THREADS": "4",
        },
    }


def run_job(name: str, what: str, *, gpus: str) -> Ended:
    """Runs a job to its end, whatever that is."""
    return run_module(_MODULE, name, what, timeout=TIMEOUT_SECONDS, **_arrangement(name, gpus))


def measure_job(name: str, what: str, *, gpus: str) -> Answer:
    """Runs a job that must succeed. Raises `RuntimeError` where it does not, with its first error."""
    return measure_part(_MODULE, name, what, timeout=TIMEOUT_SECONDS, **_arrangement(name, gpus))


def try_job(name: str, what: str, *, gpus: str, timeout: float) -> Answer:
    """Runs a job of a rival, which may refuse: its answer, or `{"error": ...}`."""
    return try_part(_MODULE, name, what, timeout=timeout, **_arrangement(name, gpus))


def figures_of_bits(name: str, answer: Answer) -> list[results.Figure]:
    """The figures of a job that compared graphed bits with eager's."""
    replays = sum(report["replays"] for report in answer["reports"])
    calls = sum(report["calls"] for report in answer["reports"])
    what = f"losses and gradients that differ from eager's in {answer['steps']} steps"
    return [
        results.Figure(name=f"{name}: {what}", value=len(answer["differences"]), unit="tensors", bar=0),
        results.Figure(name=f"{name}: share of layer calls replayed", value=replays / calls, unit="1"),
    ]


def comparison_of(compared: Sequence[dict[str, Any]]) -> results.Comparison | None:
    """Adds up answers with `differences`, `steps` and the `reports` of every rank; None of none."""
    if not compared:
        return None
    reports = [report for answer in compared for report in answer["reports"]]
    eager: dict[str, int] = {}
    for report in reports:
        for reason, count in report["eager"].items():
            eager[reason] = eager.get(reason, 0) + count
    return results.Comparison(
        bitwise_equal=not any(answer["differences"] for answer in compared),
        steps=sum(answer["steps"] for answer in compared),
        calls=sum(report["calls"] for report in reports),
        replays=sum(report["replays"] for report in reports),
        eager=eager,
    )
