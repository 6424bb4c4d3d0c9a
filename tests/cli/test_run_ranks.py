# SPDX-License-Identifier: Apache-2.0
"""Under torchrun: one rank speaks, the others keep to warnings."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_scripts import TRAINING
from torchrun import run_two_ranks

from megagraph.report import read_report

pytestmark = pytest.mark.megatron

# Documents of 16 tokens on rank 0 and of 15 on rank 1, four to a pack: each learns a capacity of its own.
RANKS = TRAINING.replace("n % 20 + 5", "16 - int(os.environ['RANK'])").replace("import sys", "import os, sys")
END = "from megagraph.log import log; log.info('one line'); log.warning('a warning')"


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs or none")
def test_of_two_ranks_one_prints_and_warnings_carry_their_rank(
    script: Callable[..., Path], tmp_path: Path
) -> None:
    """Every rank printed the table, the log and its own advice on capacities, without its number."""
    report = tmp_path / "report.json"
    job = run_two_ranks(
        *("-m", "megagraph", "run", str(script(RANKS)), "3", END),
        MEGAGRAPH_REPORT=str(report),
        MEGAGRAPH_CUDA_GRAPH_WARMUP_STEPS="1",
    )
    out, err = job.out, job.log
    assert job.returncode == 0, err
    assert out.count("loss") == 2 * 3  # both trained
    for once in (
        "layer calls",
        "installed in megatron-core",
        "learned from",
        "captured 4 graphs",
        "one line",
    ):
        assert err.count(once) == 1, f"{once}\n{err}"
    said = [line for line in err.splitlines() if "a warning" in line]
    assert sorted(said) == ["megagraph: [rank 1] a warning", "megagraph: a warning"]
    (model,) = read_report(report)
    assert model["replays"] == 2 * 2
