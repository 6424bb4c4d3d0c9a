# SPDX-License-Identifier: Apache-2.0
"""Packs that each say by how many ranks they are shared: graphs of every size have the bits of eager."""

from typing import Any

import pytest
import schedule_jobs
import torch
from worlds import World

pytestmark = pytest.mark.megatron

# Over the largest entry of each gradient: sums over rows in another order; in bfloat16 on a GPU.
BOUND = 5e-2 if torch.cuda.is_available() else 2e-5
SIZES = (1, 2, 4)
# By step and rank. Documents that need four ranks, two, and one; and all three in one micro-batch.
LENGTHS = [
    [[120, 7], [60], [58, 3], [1]],
    [[], [250, 30, 31], [], [5, 6, 7, 8, 9]],
    [[120], [60], [], [60]],
    [[9, 9], [100, 4], [33], [128]],
]


def steps(count: int) -> list[list[list[int]]]:
    """Documents of as many steps."""
    return [LENGTHS[index % len(LENGTHS)] for index in range(count)]


def check(runs: list[dict[str, Any]], reasons: frozenset[str] = frozenset({"WARMING_UP"})) -> None:
    """Every rank replays what it has warmed up, and is as far from one process as sums in another order."""
    for run in runs:
        report = run["report"]
        assert report["failures"] == [] and set(report["eager"]) == reasons
        assert run["off"] <= BOUND
        met = {str(size) for sizes in run["sizes"][1:] for size in sizes}
        for size, counts in report["cp_sizes"].items():
            assert size not in met or counts["replayed"] > 0
        replayed = sum(counts.get("replayed", 0) for counts in report["cp_sizes"].values())
        assert replayed == sum(run["numbers"][1:])


@pytest.mark.parametrize("forced", [None, *SIZES])
def test_every_size_forced_and_as_scheduled(world4: World, forced: int | None) -> None:
    lengths = steps(8) if forced is None else [[[30, 7], [20], [25, 3], [16]]] * 6
    runs = world4.run(schedule_jobs.train_scheduled, lengths=lengths, cp_sizes=SIZES, forced=forced)
    check(runs)
    sizes = {size for run in runs for of_step in run["sizes"] for size in of_step}
    assert sizes == ({*SIZES} if forced is None else {forced})
    # In one step some ranks share a pack while others have one each.
    assert forced is not None or any(
        {run["sizes"][step][place] for run in runs} >= {1, 2}
        for step in range(len(lengths))
        for place in range(runs[0]["numbers"][step])
    )
