# SPDX-License-Identifier: Apache-2.0
"""Runs a program as the two ranks of a job of its own, and waits longer for it on a busy machine."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Job", "patience", "run_two_ranks"]

SECONDS = 240  # imports of all ranks


def patience() -> float:
    """How many times as long all takes while this machine is busy: limits of time are multiplied by it."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Job(NamedTuple):
    """How it ended, and what all of its ranks wrote."""

    returncode: int
    out: str
    log: str


def run_two_ranks(*program: str, **environment: str) -> Job:
    """Runs `python PROGRAM` under torchrun; `environment` are variables beside this process's own."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    variables: Mapping[str, str] = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    with subprocess.Popen(
        [sys.executable, *torchrun, *program],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            out, log = job.communicate(timeout=SECONDS * patience())
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun then ends its ranks; it could not if it were killed
            raise
    return Job(job.returncode, out, log)
