# SPDX-License-Identifier: Apache-2.0
"""Step times beside the graphs that Megatron brings, or what those answer.

Each has a GPU to itself; two GPUs halve the time.
"""

import json
from functools import partial
from typing import Any

import torch

from benchmarks.host_jobs import JOBS
from benchmarks.processes import Measurement, answer_of, run_job
from megagraph import results

RIVAL_TIMEOUT_SECONDS = 80
TIMED = ("Transformer Engine, hidden 1024", "local, hidden 1024")
RIVALS = ("local", "transformer_engine")
PACKS = ("", ", canonical packs")
_OURS_MS = "forward and backward of a step, median"


def _rival(name: str, what: str, *, gpus: str) -> dict[str, Any]:
    """Runs a rival, which may refuse: then its last words."""
    code, out, err = run_job(name, what, gpus=gpus, timeout=RIVAL_TIMEOUT_SECONDS)
    if code == 0:
        answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    else:
        answer = {"refused": _last_words(err) or f"ended with {code}"}
    print(f"{name}, {what}: {answer}", flush=True)
    return answer


def _last_words(log: str) -> str:
    """The error of a traceback, with the line that raised it where it says nothing."""
    lines = [line.removeprefix("[rank0]:").strip() for line in log.splitlines()]
    lines = [line for line in lines if line.strip("^~ ")]  # marks below a line of code
    for index in reversed(range(len(lines))):
        name, colon, said = lines[index].partition(":")
        if name.endswith(("Error", "Exception")) and " " not in name:
            return lines[index][:300] if colon and said.strip() else f"{name}: {lines[index - 1]}"[:300]
    return ""


def _times(name: str, gpu: str) -> list[results.Figure]:
    eager, ours = (answer_of(name, what, gpus=gpu)["median_ms"] for what in ("eager", "megagraph"))
    figure = results.Figure(
        name=f"{name}: {_OURS_MS}", value=ours, unit="ms", bar=eager, rival="eager", rival_value=eager
    )
    figures = [figure]
    for rival in RIVALS:
        if rival == "transformer_engine" and not JOBS[name].transformer_engine:
            continue
        for packs in PACKS:
            answer = _rival(name, rival + packs, gpus=gpu)
            said = f": {answer['refused']}" if "refused" in answer else ""
            figures.append(
                results.Figure(
                    name=figure.name,
                    value=ours,
                    unit="ms",
                    rival=f"Megatron's graphs, {rival}{packs}{said}",
                    rival_value=answer.get("median_ms"),
                )
            )
    return figures


def run() -> None:
    """Measures and writes benchmarks/results/megatron_graphs.json; raises where a part failed."""
    gpus = min(torch.cuda.device_count(), len(TIMED))
    measurement = Measurement("megatron_graphs")
    times = {f"times of {name}": partial(_times, name, str(index % gpus)) for index, name in enumerate(TIMED)}
    measurement.take(times, gpus)
    measurement.check()
