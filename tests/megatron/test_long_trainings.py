# SPDX-License-Identifier: Apache-2.0
"""A thousand steps of two ranks that change nothing: eager's bits throughout, and no alarm."""

from functools import partial
from typing import Any

import parallel_jobs
import pytest
from worlds import World

pytestmark = [pytest.mark.megatron, pytest.mark.soak]

STEPS, VERIFY_ONE_IN = 1000, 20
TIMEOUT_SECONDS = 1800
JOBS: dict[str, dict[str, Any]] = {
    "tensor parallelism": {
        "tensor_parallel": 2,
        "config": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
    "data parallelism": {
        "own_packs": True,
        "make": partial(parallel_jobs.ShardedTrainer, parallel_jobs.OPTIONS),
        "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True},
    },
}


@pytest.mark.parametrize("name", JOBS)
def test_a_thousand_steps_of_two_ranks(world2: World, name: str) -> None:
    reports = world2.run(
        parallel_jobs.train_pair,
        num_steps=STEPS,
        plugin={"verify": VERIFY_ONE_IN},
        timeout_seconds=TIMEOUT_SECONDS,
        **JOBS[name],
    )
    for report in reports:
        assert set(report["eager"]) == {"WARMING_UP"} and report["failures"] == []
        assert report["replays"] >= 0.99 * report["calls"]
        assert report["verification"]["verified"] >= STEPS / VERIFY_ONE_IN
