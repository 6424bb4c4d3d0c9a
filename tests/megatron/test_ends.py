# SPDX-License-Identifier: Apache-2.0
"""Jobs end, however they end: NCCL waits for ever for a communicator that a living graph holds."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from megatron_rig import ON_GPU
from torchrun import run_two_ranks

HERE = Path(__file__).parent
WAYS = ("released", "destroyed", "forgotten", "raised")
# Whether it ends is a matter of chance on a GPU only, where each way has jobs of its own, of twenty seconds.
TIMES = [0, *(pytest.param(time, marks=pytest.mark.soak) for time in (1, 2, 3, 4))]


@pytest.mark.parametrize("time", TIMES if ON_GPU else [0])
@pytest.mark.parametrize("ways", [[way] for way in WAYS] if ON_GPU else [WAYS], ids="-".join)
def test_a_job_ends(ways: Sequence[str], time: int) -> None:
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    job = run_two_ranks(str(HERE / "end_of_job.py"), *ways, PYTHONPATH=os.pathsep.join(paths))
    assert (job.returncode != 0) == ("on purpose" in job.log) == ("raised" in ways), job.log
    assert job.out.count("has ended") == 2 * len({*ways} - {"raised"})
