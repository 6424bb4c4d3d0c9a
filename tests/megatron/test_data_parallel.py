# SPDX-License-Identifier: Apache-2.0
"""Data parallelism over two ranks, with what Megatron's DDP overlaps: the bits of eager."""

from typing import Any

import parallel_jobs
import pytest
from worlds import World

pytestmark = pytest.mark.megatron

SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    "ddp",
    [
        {},
        {"overlap_grad_reduce": True},
        {"overlap_grad_reduce": True, "bucket_size": 4000},
        SHARDED,
        {**SHARDED, "bucket_size": 4000},
        {**SHARDED, "bucket_size": 4000, "align_param_gather": True},
    ],
    ids=["plain", "reduce", "reduce, buckets", "gather", "gather, buckets", "gather, aligned"],
)
def test_bits(world2: World, ddp: dict[str, Any]) -> None:
    """Ranks see packs of their own. A layer that ran before its weights are gathered would read NaN."""
    reports = world2.run(
        parallel_jobs.train_pair,
        ddp=ddp,
        data_parallel=True,
        sharded="overlap_param_gather" in ddp,
        evaluate_at=(4,),
    )
    for report in reports:
        assert set(report["eager"]) == {"WARMING_UP"} and report["failures"] == []
        assert report["eager"]["WARMING_UP"] == 2 * 3 * report["layers"]


@pytest.mark.parametrize("bucket_size", [1000, 2000, 4000])
def test_one_rank_runs_eager_where_the_other_replays(world2: World, bucket_size: int) -> None:
    """Bug: a replay told DDP of a layer's gradients in another order than eager, so that two ranks started
    the reductions of their buckets in different orders, and each got what was meant for another bucket."""
    reports = world2.run(
        parallel_jobs.train_pair,
        ddp={**SHARDED, "bucket_size": bucket_size},
        data_parallel=True,
        sharded=True,
        misfits_on=1,
        num_steps=8,
    )
    layers = reports[0]["layers"]
    assert reports[0]["eager"] == {"WARMING_UP": 3 * layers}
    assert reports[1]["eager"] == {"WARMING_UP": 3 * layers, "TOO_MANY_SEQUENCES": 4 * layers}
