# SPDX-License-Identifier: Apache-2.0
"""Runs a program as the two ranks of a job of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Job", "run_two_ranks"]

SECONDS = 240  # imports of all ranks, on a machine that does other things too


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
            out, log = job.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun then ends its ranks; it could not if it were killed
            raise
    return Job(job.returncode, out, log)
