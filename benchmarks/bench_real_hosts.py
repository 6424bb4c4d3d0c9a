# SPDX-License-Identifier: Apache-2.0
"""Real environments on two GPUs: the bits of Transformer Engine, tensor and data parallel, and how they end.

Jobs run side by side: nothing is timed.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.host_jobs import JOBS
from benchmarks.processes import TIMEOUT_SECONDS, Measurement, run_job
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
        code, _out, err = run_job("exit", "bits", gpus="0,1", timeout=TIMEOUT_SECONDS)
        if code != 0:
            print(f"ended with {code}:\n{err[-2000:]}", flush=True)
        return code

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
    measurement = Measurement("real_hosts")
    bits = {name: measurement.bits_of(name, gpus) for name, gpus in (ALONE | _together()).items()}
    measurement.take({"exits": _exits, **bits}, SIDE_BY_SIDE)
    measurement.check()
