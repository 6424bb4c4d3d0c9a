# SPDX-License-Identifier: Apache-2.0
"""Experts beside tensor parallelism: ranks that share the rows of a pack, each with all experts or some."""

from collections.abc import Sequence
from typing import Any

import moe_jobs
import moe_rig
import pytest
from worlds import World

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]

BIAS = moe_rig.CASES["sigmoid, bias, groups"]


@pytest.mark.parametrize("expert_parallel", [1, 2])
@pytest.mark.parametrize("scopes", [("attn",), ("attn", "mlp", "moe_router")], ids=" ".join)
def test_ranks_that_share_rows(world2: World, scopes: Sequence[str], expert_parallel: int) -> None:
    options: dict[str, Any] = {**BIAS, "moe_shared_expert_intermediate_size": 24}
    reports = world2.run(moe_jobs.train_shared, scopes=scopes, expert_parallel=expert_parallel, **options)
    for report in reports:
        assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}, report


@pytest.mark.parametrize("expert_parallel", [1, 2])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_rows_of_padding_reach_no_expert(world2: World, mode: str, expert_parallel: int) -> None:
    """Also where all rows of one rank are padding."""
    options = {"expert_parallel": expert_parallel, **BIAS}
    world2.run(moe_jobs.assert_valid_rows_alone_are_routed, mode=mode, **options)
