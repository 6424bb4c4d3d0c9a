# SPDX-License-Identifier: Apache-2.0
"""Real environments on two GPUs: Transformer Engine, tensor and data parallel, Megatron-LM's own loop.

Bits against eager for each; how runs end whose graphs hold NCCL; step times beside Megatron's own graphs,
or what those answer. What compares bits runs side by side; what is timed has a GPU to itself.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import megatron_lm
from benchmarks.host_jobs import JOBS
from megagraph import results

TIMEOUT_SECONDS = 300
RIVAL_TIMEOUT_SECONDS = 80
SIDE_BY_SIDE = 5
NUM_EXITS = 10
TIMED = ("Transformer Engine, hidden 1024", "local, hidden 1024")
RIVALS = ("local", "transformer_engine")
PACKS = ("", ", canonical packs")
_OURS_MS = "forward and backward of a step, median"


def _run(name: str, what: str, *, gpus: str, timeout: int) -> tuple[int | None, str, str]:
    """Runs a job. Returns its exit code, None where it had to be killed, and what it wrote."""
    ranks = JOBS[name].ranks
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpus,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it with sequence parallelism
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "OMP_NUM_THREADS": "4",
    }
    process = subprocess.Popen(
        [*launcher, "benchmarks.host_jobs", name, what],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a launcher's ranks can be ended with it
    )
    try:
        out, err = process.communicate(timeout=timeout)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        return None, out, err


def _answer(name: str, what: str, *, gpus: str) -> dict[str, Any]:
    """Runs a job that must succeed."""
    code, out, err = _run(name, what, gpus=gpus, timeout=TIMEOUT_SECONDS)
    if code != 0:
        print(f"{name}, {what}: ended with {code}\n{err[-6000:]}", flush=True)
        raise RuntimeError(f"{name}, {what}: ended with {code}")
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    print(f"{name}, {what}: {str(answer)[:250]}", flush=True)
    return answer


def _rival(name: str, what: str, *, gpus: str) -> dict[str, Any]:
    """Runs a rival, which may refuse: then its last words."""
    code, out, err = _run(name, what, gpus=gpus, timeout=RIVAL_TIMEOUT_SECONDS)
    if code == 0:
        answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    else:
        said = [line.removeprefix("[rank0]: ") for line in err.splitlines() if "Error" in line]
        answer = {"refused": said[-1][:300] if said else f"ended with {code}"}
    print(f"{name}, {what}: {answer}", flush=True)
    return answer


def _bits_figures(name: str, answer: dict[str, Any]) -> list[results.Figure]:
    replays = sum(report["replays"] for report in answer["reports"])
    calls = sum(report["calls"] for report in answer["reports"])
    return [
        results.Figure(
            name=f"{name}: losses and gradients that differ from eager's in {answer['steps']} steps",
            value=len(answer["differences"]),
            unit="tensors",
            bar=0,
        ),
        results.Figure(name=f"{name}: share of layer calls replayed", value=replays / calls, unit="1"),
    ]


def _loop(spec: str, gpu: str) -> list[results.Figure]:
    with tempfile.TemporaryDirectory() as folder:
        loop = megatron_lm.measure(Path(folder), spec=spec, gpu=gpu)
    return [
        results.Figure(
            name=f"Megatron-LM's loop, {spec}: printed losses and norms that differ ({pair}), "
            f"of {found['compared']}",
            value=len(found["different"]) + found["only_in_one"],
            unit="figures",
            bar=0,
        )
        for pair, found in loop["comparisons"].items()
    ]


def _exits() -> list[results.Figure]:
    """Short runs with NCCL in their graphs: how many end by themselves, and well."""

    def code(_: int) -> int | None:
        return _run("exit", "bits", gpus="0,1", timeout=TIMEOUT_SECONDS)[0]

    with ThreadPoolExecutor(SIDE_BY_SIDE) as runs:
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


def _times(name: str, gpu: str) -> list[results.Figure]:
    eager, ours = (_answer(name, what, gpus=gpu)["median_ms"] for what in ("eager", "megagraph"))
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


class _Measurement:
    """Everything measured so far, and what could not be."""

    def __init__(self) -> None:
        self.figures: list[results.Figure] = []
        self.failures: list[str] = []
        self._compared: list[dict[str, Any]] = []

    def bits(self, name: str, gpus: str) -> list[results.Figure]:
        """Compares a job's graphed bits with eager's."""
        answer = _answer(name, "bits", gpus=gpus)
        self._compared.append(answer)
        return _bits_figures(name, answer)

    def take(self, parts: dict[str, Callable[[], list[results.Figure]]], workers: int) -> None:
        """Measures parts side by side, and writes. One that fails is named, and the others stay."""
        with ThreadPoolExecutor(workers) as pool:
            started = {name: pool.submit(part) for name, part in parts.items()}
            for name, part in started.items():
                try:
                    self.figures += part.result()
                except (RuntimeError, OSError, ValueError) as error:
                    self.failures.append(f"{name}: {error}")
        result = results.Result(
            environment=results.describe_environment(),
            figures=tuple(self.figures),
            comparison=self._comparison(),
        )
        path = Path(os.environ.get("OUT", Path(__file__).parent / "results"), "real_hosts.json")
        result.write(path)
        print(f"wrote {path}", flush=True)

    def _comparison(self) -> results.Comparison:
        reports = [report for answer in self._compared for report in answer["reports"]]
        eager: dict[str, int] = {}
        for report in reports:
            for reason, count in report["eager"].items():
                eager[reason] = eager.get(reason, 0) + count
        return results.Comparison(
            bitwise_equal=not any(answer["differences"] for answer in self._compared),
            steps=sum(answer["steps"] for answer in self._compared),
            calls=sum(report["calls"] for report in reports),
            replays=sum(report["replays"] for report in reports),
            eager=eager,
        )


def run() -> None:
    """Measures and writes benchmarks/results/real_hosts.json; raises where a part failed."""
    if torch.cuda.device_count() < 2:
        raise RuntimeError(f"real_hosts needs two GPUs, found {torch.cuda.device_count()}")
    measured = _Measurement()
    gpus = {f"Transformer Engine, hidden {hidden}": str(gpu) for gpu, hidden in enumerate((1024, 4096))}
    gpus |= {name: "0,1" for name, job in JOBS.items() if job.ranks == 2 and name != "exit"}
    bits = {name: partial(measured.bits, name, which) for name, which in gpus.items()}
    loops = {
        f"Megatron-LM's loop, {spec}": partial(_loop, spec, str(gpu))
        for gpu, spec in enumerate(megatron_lm.SPECS)
    }
    times = {f"times of {name}": partial(_times, name, str(gpu)) for gpu, name in enumerate(TIMED)}
    measured.take(loops | bits, SIDE_BY_SIDE + len(loops))
    measured.take({"exits": _exits}, 1)
    measured.take(times, len(times))
    if measured.failures:
        raise RuntimeError("; ".join(measured.failures))
