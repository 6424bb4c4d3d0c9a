# SPDX-License-Identifier: Apache-2.0
"""Runs jobs of `host_jobs` in processes of their own, and collects what they answer into one result."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.host_jobs import JOBS
from benchmarks.tables import result_path
from megagraph import results

TIMEOUT_SECONDS = 300


def run_job(name: str, what: str, *, gpus: str, timeout: int) -> tuple[int | None, str, str]:
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


def answer_of(name: str, what: str, *, gpus: str) -> dict[str, Any]:
    """Runs a job that must succeed."""
    code, out, err = run_job(name, what, gpus=gpus, timeout=TIMEOUT_SECONDS)
    if code != 0:
        print(f"{name}, {what}: ended with {code}\n{err[-6000:]}", flush=True)
        raise RuntimeError(f"{name}, {what}: ended with {code}")
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    print(f"{name}, {what}: {str(answer)[:250]}", flush=True)
    return answer


Parts = dict[str, Callable[[], list[results.Figure]]]


class Measurement:
    """Everything measured so far, and what could not be.

    Args:
        name: of the file, benchmarks/results/NAME.json.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._figures: list[results.Figure] = []
        self._failures: list[str] = []
        self._compared: list[dict[str, Any]] = []

    def bits_of(self, name: str, gpus: str) -> Callable[[], list[results.Figure]]:
        """A part that compares a job's graphed bits with eager's."""
        return partial(self._bits, name, gpus)

    def _bits(self, name: str, gpus: str) -> list[results.Figure]:
        answer = answer_of(name, "bits", gpus=gpus)
        self._compared.append(answer)
        replays = sum(report["replays"] for report in answer["reports"])
        calls = sum(report["calls"] for report in answer["reports"])
        what = f"losses and gradients that differ from eager's in {answer['steps']} steps"
        return [
            results.Figure(name=f"{name}: {what}", value=len(answer["differences"]), unit="tensors", bar=0),
            results.Figure(name=f"{name}: share of layer calls replayed", value=replays / calls, unit="1"),
        ]

    def take(self, parts: Parts, workers: int) -> None:
        """Measures parts side by side, and writes. One that fails is named, and the others stay."""
        with ThreadPoolExecutor(workers) as pool:
            started = {name: pool.submit(part) for name, part in parts.items()}
            for name, part in started.items():
                try:
                    self._figures += part.result()
                except (RuntimeError, OSError, ValueError) as error:
                    self._failures.append(f"{name}: {error}")
        result = results.Result(
            environment=results.describe_environment(),
            figures=tuple(self._figures),
            comparison=self._comparison() if self._compared else None,
        )
        path = result_path(self._name)
        result.write(path)
        print(f"wrote {path}", flush=True)

    def check(self) -> None:
        """Raises `RuntimeError` where a part failed, naming each."""
        if self._failures:
            raise RuntimeError("; ".join(self._failures))

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
