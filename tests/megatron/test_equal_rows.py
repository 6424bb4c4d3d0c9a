# SPDX-License-Identifier: Apache-2.0
"""Experts over ranks that take as many rows from each, while each rank has packs of its own."""

from typing import Any

import equal_rows_jobs
import moe_rig
import pytest
from worlds import World

pytestmark = pytest.mark.megatron

SCOPES = ("attn", "moe_router", "mlp")
CASES: dict[str, dict[str, Any]] = {
    "allgather": {**moe_rig.CASES["sigmoid, bias, groups"], "moe_token_dispatcher_type": "allgather"},
    "drop and pad": {**moe_rig.CASES["drop and pad"], "moe_shared_expert_intermediate_size": 24},
}
STEPS = 20
SITES = 2
MISFITS = 3 * STEPS // equal_rows_jobs.EVERY * SITES


@pytest.mark.parametrize("case", CASES)
def test_ranks_with_packs_of_their_own(world2: World, case: str) -> None:
    """Where a pack of one rank fits no capacity, both run theirs as they were given."""
    reports = world2.run(
        equal_rows_jobs.train,
        scopes=SCOPES,
        num_steps=STEPS,
        misfits_on=1,
        **CASES[case],
        timeout_seconds=200,
    )
    for report, reason in zip(reports, ("GROUP_DISAGREED", "TOO_MANY_SEQUENCES"), strict=True):
        assert report["failures"] == []
        assert report["eager"] == {"WARMING_UP": 3 * SITES, reason: MISFITS}
        assert report["replays"] == 3 * STEPS * SITES - 3 * SITES - MISFITS
