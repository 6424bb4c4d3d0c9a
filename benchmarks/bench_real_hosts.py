# SPDX-License-Identifier: Apache-2.0
"""Real environments on two GPUs: the bits of Transformer Engine, tensor and data parallel, and how they end.

Jobs run side by side: nothing is timed.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from benchmarks.hosts.measure_job import JOBS
from benchmarks.hosts.run_jobs import comparison_of, figures_of_bits, measure_job, run_job
from benchmarks.measuring.compare import Answer
from benchmarks.measuring.publish import Measurement, Part
from megagraph import results

# Jobs of one GPU, and which.
ALONE = {
    "Transformer Engine, 12 layers of hidden 1024": "0",
    "Transformer Engine, 4 layers of hidden 4096": "1",
}
SIDE_BY_SIDE = 5
EXITS_SIDE_BY_SIDE = 2
NUM_EXITS = 10


def _exits() -> list[results.Figure]:
    """Short runs with NCCL in their graphs: how many end by themselves, and well."""

    def code(_: int) -> int | None:
        ended = run_job("exit", "bits", gpus="0,1")
        if ended.code != 0:
            print(f"{ended.why}:\n{ended.log[-2000:]}", flush=True)
        return ended.code

    with ThreadPoolExecutor(EXITS_SIDE_BY_SIDE) as runs:
        codes = list(runs.map(code, range(NUM_EXITS)))
    print(f"exit codes: {codes}", flush=True)
    return [
        results.Figure(
            name=f"runs with NCCL in their graphs that end well, of {NUM_EXITS}",
            value=codes.count(0),
            unit="runs",
            bar=NUM_EXITS,
            better="higher",
        )
    ]


def _together() -> dict[str, str]:
    return {name: "0,1" for name, job in JOBS.items() if job.ranks == 2 and name != "exit"}


def run() -> None:
    """Measures and writes benchmarks/results/real_hosts.json; raises where a part failed."""
    if torch.cuda.device_count() < 2:
        raise RuntimeError(f"real_hosts needs two GPUs, found {torch.cuda.device_count()}")
    compared: list[Answer] = []

    def bits(name: str, gpus: str) -> list[results.Figure]:
        answer = measure_job(name, "bits", gpus=gpus)
        figures = figures_of_bits(name, answer)
        compared.append(answer)
        return figures

    parts: dict[str, Part] = {"exits": _exits}
    parts |= {name: partial(bits, name, gpus) for name, gpus in (ALONE | _together()).items()}
    measurement = Measurement("real_hosts")
    measurement.take_side_by_side(parts, SIDE_BY_SIDE)
    measurement.publish(comparison_of(compared))
