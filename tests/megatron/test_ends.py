# SPDX-License-Identifier: Apache-2.0
"""Jobs end, however they end: NCCL waits for ever for a communicator that a living graph holds."""

import os
from pathlib import Path

import pytest
import torch
from torchrun import run_two_ranks

pytestmark = pytest.mark.megatron

HERE = Path(__file__).parent
# Whether it ends is a matter of chance on a GPU only, where each job takes twenty seconds.
TIMES = [0, *(pytest.param(time, marks=pytest.mark.soak) for time in (1, 2, 3, 4))]


@pytest.mark.parametrize("time", TIMES if torch.cuda.is_available() else [0])
@pytest.mark.parametrize("way", ["released", "destroyed", "raised", "forgotten"])
def test_a_job_ends(way: str, time: int) -> None:
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    job = run_two_ranks(str(HERE / "end_of_job.py"), way, PYTHONPATH=os.pathsep.join(paths))
    if way == "raised":
        assert job.returncode != 0 and "on purpose" in job.log and "has ended" not in job.out
    else:
        assert job.returncode == 0, job.log
        assert job.out.count("has ended") == 2
