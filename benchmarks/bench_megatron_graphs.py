# SPDX-License-Identifier: Apache-2.0
"""Step times beside the graphs that Megatron brings, or what those answer.

On packs as they come, and on canonical packs, whose shapes never change: each rival beside ours on the same
packs. Each model has a GPU to itself; two GPUs halve the time.
"""

from collections.abc import Mapping
from functools import partial
from threading import Lock

import torch

from benchmarks.hosts.measure_job import JOBS
from benchmarks.hosts.run_jobs import measure_job, try_job
from benchmarks.measuring.compare import Answer, against_each
from benchmarks.measuring.publish import Measurement
from megagraph import results

RIVAL_TIMEOUT_SECONDS = 80
TIMED = ("Transformer Engine, hidden 1024", "local, hidden 1024")
RIVALS = ("local", "transformer_engine")
PACKS = ("", ", canonical packs")  # as they come, or of one shape


def figures_of(
    name: str, packs: str, ours: Answer, eager: Answer, rivals: Mapping[str, Answer]
) -> list[results.Figure]:
    """Our step on some packs beside eager's and the rivals' on the same packs."""
    others = {"eager": eager, **{f"Megatron's graphs, {rival}": answer for rival, answer in rivals.items()}}
    return against_each(
        f"{name}: forward and backward of a step, median{packs}",
        ours["median_ms"],
        "ms",
        {f"{rival}{packs}": answer for rival, answer in others.items()},
        _median_ms,
        bar=eager["median_ms"],
    )


def _median_ms(answer: Answer) -> float:
    milliseconds: float = answer["median_ms"]
    return milliseconds


def _times(name: str, packs: str, gpu: str) -> list[results.Figure]:
    eager, ours = (measure_job(name, what + packs, gpus=gpu) for what in ("eager", "megagraph"))
    kinds = RIVALS if JOBS[name].transformer_engine else RIVALS[:1]
    rivals = {kind: try_job(name, kind + packs, gpus=gpu, timeout=RIVAL_TIMEOUT_SECONDS) for kind in kinds}
    return figures_of(name, packs, ours, eager, rivals)


def run() -> None:
    """Measures and writes benchmarks/results/megatron_graphs.json; raises where a part failed."""
    gpus = [Lock() for _ in range(min(torch.cuda.device_count(), len(TIMED)))]

    def times(name: str, packs: str, gpu: int) -> list[results.Figure]:
        with gpus[gpu]:
            return _times(name, packs, str(gpu))

    parts = {
        f"times of {name}{packs}": partial(times, name, packs, index % len(gpus))
        for packs in PACKS
        for index, name in enumerate(TIMED)
    }
    measurement = Measurement("megatron_graphs")
    measurement.take_side_by_side(parts, len(parts))
    measurement.publish()
