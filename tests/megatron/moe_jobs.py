# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks that train models with experts, each on packs of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import moe_rig
import parallel_jobs
from megatron_rig import Micro, graph_config
from torch import distributed


def train_pair(
    *,
    scopes: Sequence[str],
    num_steps: int = 8,
    misfits_on: int | None = None,
    steps_of: Callable[..., list[list[Micro]]] = parallel_jobs.steps_of,
    plugin: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Trains in mode `eager` and with graphs and compares every step's bits; returns the graphs' report.

    Args:
        scopes: what is graphed.
        num_steps: to train.
        misfits_on: the rank some of whose packs fit no capacity.
        steps_of: makes the packs of this rank.
        plugin: further options.
        changes: of the model's config.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    rank = distributed.get_rank()
    steps = steps_of(num_steps, seed=rank, misfits=rank == misfits_on)
    runs = []
    with moe_rig.experts_on_cpu():
        for mode in ("eager", "graph"):
            model_parallel_cuda_manual_seed(7, force_reset_rng=True)
            config = graph_config(mode=mode, cuda_graph_modules=scopes, **(plugin or {}))
            runs.append(moe_rig.run(config, "E-", steps, **changes))
    for index, (one, other) in enumerate(zip(runs[0].steps, runs[1].steps, strict=True)):
        moe_rig.assert_same_step(one, other, f"step {index}:")
    report: dict[str, Any] = runs[1].report
    return report


def train_spread(**options: Any) -> dict[str, Any]:
    """As `train_pair()`, with the experts spread over all ranks."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=distributed.get_world_size())
    return train_pair(expert_model_parallel_size=distributed.get_world_size(), **options)
