# SPDX-License-Identifier: Apache-2.0
"""Real environments on two GPUs: Transformer Engine, tensor and data parallel, Megatron-LM's own loop.

Bits against eager for each; how runs end whose graphs hold NCCL; step times beside Megatron's own graphs,
or what those answer. Jobs of one GPU run two at a time; what is timed runs alone.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import megatron_lm
from benchmarks.host_jobs import JOBS
from megagraph import results

TIMEOUT_SECONDS = 240
NUM_EXITS = 10
TIMED = ("TE, hidden 1024", "local, hidden 1024")
RIVALS = (
    "local",
    "local, canonical packs",
    "transformer_engine",
    "transformer_engine, canonical packs",
)
_OURS_MS = "forward and backward of a step, median"


def _start(name: str, what: str, *, gpus: str) -> subprocess.Popen[str]:
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
    return subprocess.Popen(
        [*launcher, "benchmarks.host_jobs", name, what],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> tuple[int | None, str, str]:
    """Exit code, None where it had to be killed, and what it wrote."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return None, out, err
    return process.returncode, out, err


def _answer(name: str, what: str, *, gpus: str) -> dict[str, Any]:
    """Runs a job that must succeed."""
    code, out, err = _finish(_start(name, what, gpus=gpus))
    if code != 0:
        print(f"{name}, {what}: ended with {code}\n{err[-6000:]}", flush=True)
        raise RuntimeError(f"{name}, {what}: ended with {code}")
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    print(f"{name}, {what}: {str(answer)[:300]}", flush=True)
    return answer


def _try(name: str, what: str) -> dict[str, Any]:
    """Runs a rival, which may refuse: then its last words."""
    code, out, err = _finish(_start(name, what, gpus="0"))
    if code == 0:
        answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    else:
        said = [line for line in err.splitlines() if line.strip() and not line.startswith((" ", "["))]
        answer = {"refused": said[-1][:300] if said else f"ended with {code}"}
    print(f"{name}, {what}: {answer}", flush=True)
    return answer


def _bits_of_one_gpu(gpu: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {name: _answer(name, "bits", gpus=gpu) for name in names}


def _exits() -> list[int | None]:
    """Exit codes of short runs with NCCL in their graphs, five at a time."""
    codes: list[int | None] = []
    for _ in range(NUM_EXITS // 5):
        started = [_start("exit", "bits", gpus="0,1") for _ in range(5)]
        codes += [_finish(process)[0] for process in started]
    print(f"exit codes: {codes}", flush=True)
    return codes


def run() -> None:
    """Measures and writes benchmarks/results/real_hosts.json."""
    if torch.cuda.device_count() < 2:
        raise RuntimeError(f"real_hosts needs two GPUs, found {torch.cuda.device_count()}")
    single = [name for name, job in JOBS.items() if job.ranks == 1]
    double = [name for name, job in JOBS.items() if job.ranks == 2 and name != "exit"]
    bits: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as lanes:
        halves = [lanes.submit(_bits_of_one_gpu, str(gpu), single[gpu::2]) for gpu in range(2)]
        for half in halves:
            bits |= half.result()
        logs = [
            lanes.submit(megatron_lm.measure, Path(folder), spec=spec, gpu=str(gpu))
            for gpu, spec in enumerate(megatron_lm.SPECS)
        ]
        loops = [log.result() for log in logs]
    bits |= {name: _answer(name, "bits", gpus="0,1") for name in double}
    codes = _exits()
    figures = _bits_figures(bits)
    figures.append(
        results.Figure(
            name="runs with NCCL in their graphs that end well",
            value=sum(code == 0 for code in codes),
            unit="of 10",
            bar=NUM_EXITS,
            better="higher",
        )
    )
    for loop in loops:
        figures += _loop_figures(loop)
    for name in TIMED:
        figures += _time_figures(name)
    result = results.Result(
        environment=results.describe_environment(),
        figures=tuple(figures),
        comparison=_comparison(bits),
    )
    path = Path(os.environ.get("OUT", Path(__file__).parent / "results"), "real_hosts.json")
    result.write(path)
    print(f"wrote {path}; bit-equal: {result.comparison.bitwise_equal if result.comparison else None}")


def _bits_figures(bits: dict[str, dict[str, Any]]) -> list[results.Figure]:
    figures = []
    for name, answer in bits.items():
        replays = sum(report["replays"] for report in answer["reports"])
        calls = sum(report["calls"] for report in answer["reports"])
        figures += [
            results.Figure(
                name=f"{name}: bits that differ from eager in {answer['steps']} steps",
                value=len(answer["differences"]),
                unit="tensors",
                bar=0,
            ),
            results.Figure(name=f"{name}: share of layer calls replayed", value=replays / calls, unit="1"),
        ]
    return figures


def _loop_figures(loop: dict[str, Any]) -> list[results.Figure]:
    return [
        results.Figure(
            name=f"Megatron-LM's loop, {loop['spec']}: printed figures that differ ({pair}), "
            f"of {compared['compared']}",
            value=len(compared["different"]) + compared["only_in_one"],
            unit="figures",
            bar=0,
        )
        for pair, compared in loop["comparisons"].items()
    ]


def _time_figures(name: str) -> list[results.Figure]:
    eager = _answer(name, "eager", gpus="0")
    ours = _answer(name, "megagraph", gpus="0")
    figures = [
        results.Figure(
            name=f"{name}: {_OURS_MS}",
            value=ours["median_ms"],
            unit="ms",
            bar=eager["median_ms"],
            rival="eager",
            rival_value=eager["median_ms"],
        )
    ]
    for rival in RIVALS:
        if rival.startswith("transformer_engine") and not JOBS[name].transformer_engine:
            continue
        answer = _try(name, rival)
        said = answer.get("refused")
        figures.append(
            results.Figure(
                name=f"{name}: {_OURS_MS}",
                value=ours["median_ms"],
                unit="ms",
                rival=f"Megatron's graphs, {rival}" + (f": {said}" if said else ""),
                rival_value=answer.get("median_ms"),
            )
        )
    return figures


def _comparison(bits: dict[str, dict[str, Any]]) -> results.Comparison:
    reports = [report for answer in bits.values() for report in answer["reports"]]
    eager: dict[str, int] = {}
    for report in reports:
        for reason, count in report["eager"].items():
            eager[reason] = eager.get(reason, 0) + count
    return results.Comparison(
        bitwise_equal=not any(answer["differences"] for answer in bits.values()),
        steps=sum(answer["steps"] for answer in bits.values()),
        calls=sum(report["calls"] for report in reports),
        replays=sum(report["replays"] for report in reports),
        eager=eager,
    )
