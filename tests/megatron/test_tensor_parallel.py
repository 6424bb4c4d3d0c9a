# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism over two ranks: the bits of eager, and what happens where one rank cannot go on."""

from typing import Any

import parallel_jobs
import pytest
from worlds import World

pytestmark = pytest.mark.megatron

STEPS, MICROS, LAYERS = 6, 3, 2
CALLS = STEPS * MICROS * LAYERS
STEP_CALLS = MICROS * LAYERS
TENSOR_PARALLEL = {"tensor_model_parallel_size": 2}


def eager_calls(report: dict[str, Any]) -> dict[str, int]:
    """The reasons beside the warm-up's; every other call replayed."""
    eager: dict[str, int] = dict(report["eager"])
    assert eager.pop("WARMING_UP") == STEP_CALLS
    return eager


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bits(world2: World, sequence_parallel: bool) -> None:
    transformer = {**TENSOR_PARALLEL, "sequence_parallel": sequence_parallel}
    for report in world2.run(parallel_jobs.train_pair, tensor_parallel=2, transformer=transformer):
        assert eager_calls(report) == {} and report["failures"] == []


def test_dropout_under_sequence_parallelism_draws_from_the_stream_of_each_rank(world2: World) -> None:
    """Bug: the stream was swapped in once more for the capture, and whoever drew a number, also one without
    effect as Transformer Engine's attention does, was not captured."""
    transformer = {**TENSOR_PARALLEL, "sequence_parallel": True, "hidden_dropout": 0.1}
    for report in world2.run(parallel_jobs.train_pair, tensor_parallel=2, transformer=transformer):
        assert eager_calls(report) == {} and report["failures"] == []


def test_evaluation_between_steps(world2: World) -> None:
    transformer = {**TENSOR_PARALLEL, "sequence_parallel": True}
    reports = world2.run(parallel_jobs.train_pair, tensor_parallel=2, transformer=transformer, evaluate_at=3)
    for report in reports:
        assert report["eager"] == {"WARMING_UP": 2 * STEP_CALLS}
        assert report["calls"] == CALLS + STEP_CALLS


@pytest.mark.parametrize(
    ("how", "here", "there"),
    [
        # A layer that rank 0 cannot capture is eager on both, from the first replayed step on.
        ("capture", {"CAPTURE_FAILED": CALLS - STEP_CALLS}, {"GROUP_DISAGREED": CALLS - STEP_CALLS}),
        # Outside of any layer: every layer is, and nobody waits for a rank that has gone.
        (
            "give up",
            {"CAPTURE_FAILED": 2 * (CALLS - STEP_CALLS)},
            {"GROUP_DISAGREED": 2 * (CALLS - STEP_CALLS)},
        ),
        # A group of its own that one rank destroys is nobody else's business.
        ("group", {}, {}),
        ("hook", {"FOREIGN_HOOK": CALLS - STEP_CALLS}, {"GROUP_DISAGREED": CALLS - STEP_CALLS}),
        ("address", {"ADDRESS_MOVED": 2 * STEP_CALLS}, {"GROUP_DISAGREED": 2 * STEP_CALLS}),
        ("skip", {"DISABLED": 2 * STEP_CALLS}, {"GROUP_DISAGREED": 2 * STEP_CALLS}),
        ("suspend", {"SUSPENDED": 2 * STEP_CALLS}, {"GROUP_DISAGREED": 2 * STEP_CALLS}),
    ],
)
def test_what_one_rank_cannot_do_none_does(
    world2: World, how: str, here: dict[str, int], there: dict[str, int]
) -> None:
    """In the same step, with the bits of eager. Numbers of calls are of both layers, of one where a
    layer alone is concerned."""
    reports = world2.run(parallel_jobs.disagree, tensor_parallel=2, how=how, transformer=TENSOR_PARALLEL)
    for report, expected in zip(reports, (here, there), strict=True):
        assert eager_calls(report) == {name: count // 2 for name, count in expected.items()}
