# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks that train models with experts, each on packs of its own."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import moe_rig
import parallel_jobs
from moe_rig import ExpertTrainer
from streams import make_groups, makes_groups
from torch import distributed


@moe_rig.experts_on_cpu()
def train_pair(
    *, scopes: Sequence[str], plugin: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """As `parallel_jobs.train_pair()`, which takes `options`; what is left of them is of the model."""
    plugin = {"cuda_graph_modules": scopes, **(plugin or {})}
    options = {"own_packs": True, **options}
    return parallel_jobs.train_pair(make=partial(ExpertTrainer, "E-"), plugin=plugin, **options)


@makes_groups
def train_spread(**options: Any) -> dict[str, Any]:
    """As `train_pair()`, with the experts spread over all ranks."""
    size = {"expert_model_parallel_size": distributed.get_world_size()}
    make_groups(**size)
    return train_pair(**size, **options)


def share_rows(expert_parallel: int) -> dict[str, int]:
    """Makes all ranks tensor-parallel ones. Returns the sizes for the model's config."""
    sizes = {
        "tensor_model_parallel_size": distributed.get_world_size(),
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": 1,
    }
    make_groups(**sizes)
    return sizes


@makes_groups
def train_shared(*, expert_parallel: int, **options: Any) -> dict[str, Any]:
    """As `train_pair()`, with packs whose rows all ranks share, and experts spread over some of them."""
    sizes = share_rows(expert_parallel)
    return train_pair(own_packs=False, sequence_parallel=True, **sizes, **options)
