# SPDX-License-Identifier: Apache-2.0
"""Under torchrun: one rank speaks, the others keep to warnings."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_scripts import TRAINING

from megagraph.report import read_report

pytestmark = pytest.mark.megatron

# Packs of their own on each rank, and a warning of the last one: somebody holds what the graphs wrote.
RANKS = TRAINING.replace("n % 20 + 5", "n % 20 + 5 + int(os.environ['RANK'])").replace(
    "import sys", "import os, sys"
)
END = "from megagraph.log import log; log.info('one line'); log.warning('a warning')"


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs or none")
def test_of_two_ranks_one_prints_and_warnings_carry_their_rank(
    script: Callable[..., Path], tmp_path: Path
) -> None:
    """Every rank printed the table, the log and its own advice on capacities, without its number."""
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=0",
        "--local-addr=127.0.0.1",
    ]
    report = tmp_path / "report.json"
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MEGAGRAPH_REPORT": str(report),
        "MEGAGRAPH_CUDA_GRAPH_WARMUP_STEPS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, *command, "-m", "megagraph", "run", str(script(RANKS)), "3", END],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 2 * 3  # both trained
    for once in (
        "layer calls",
        "installed in megatron-core",
        "learned from",
        "captured 4 graphs",
        "one line",
    ):
        assert done.stderr.count(once) == 1, f"{once}\n{done.stderr}"
    said = [line for line in done.stderr.splitlines() if "a warning" in line]
    assert sorted(said) == ["megagraph: [rank 1] a warning", "megagraph: a warning"]
    (model,) = read_report(report)
    assert model["replays"] == 2 * 2
