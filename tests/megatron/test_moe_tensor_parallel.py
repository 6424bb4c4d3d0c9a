# SPDX-License-Identifier: Apache-2.0
"""Experts beside tensor parallelism: ranks that share the rows of a pack, each with all experts or some."""

from collections.abc import Sequence
from typing import Any

import moe_jobs
import moe_rig
import pytest
from megatron_rig import Micro, graph_config, train
from moe_rig import ExpertTrainer
from torch import distributed
from worlds import World, on_ranks

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
@on_ranks(2)
@moe_rig.experts_on_cpu()
def test_rows_of_padding_reach_no_expert(mode: str, expert_parallel: int) -> None:
    """What the experts of all ranks count is what the documents' rows have chosen, whatever the tail.

    Also where all rows of one rank are padding.
    """
    changes = {**moe_jobs.share_rows(expert_parallel), "sequence_parallel": True, **BIAS}
    micros = [Micro(lengths=(20, 8), tail=10, seed=1), Micro(lengths=(10, 4), seed=2)]
    config = graph_config(mode=mode, cuda_graph_modules=("attn", "moe_router"))
    for step in train(config, [micros] * 2, ExpertTrainer, **changes).steps:
        for counts in step.counts:
            distributed.all_reduce(counts)
            assert int(counts.sum()) == 2 * (20 + 8 + 10 + 4)
