# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks that train models with experts, each on packs of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import moe_rig
import parallel_jobs
from megatron_rig import Micro, graph_config
from same_bits import assert_same_bits
from streams import seed_streams
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
    rank = distributed.get_rank()
    steps = steps_of(num_steps, seed=rank, misfits=rank == misfits_on)
    runs = []
    with moe_rig.experts_on_cpu():
        for mode in ("eager", "graph"):
            seed_streams()
            config = graph_config(mode=mode, cuda_graph_modules=scopes, **(plugin or {}))
            runs.append(moe_rig.run(config, "E-", steps, **changes))
    assert_same_bits(*runs)
    report: dict[str, Any] = runs[1].report
    return report


def train_spread(**options: Any) -> dict[str, Any]:
    """As `train_pair()`, with the experts spread over all ranks."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=distributed.get_world_size())
    return train_pair(expert_model_parallel_size=distributed.get_world_size(), **options)


def train_shared(*, expert_parallel: int, **options: Any) -> dict[str, Any]:
    """As `train_pair()`, with packs whose rows all ranks share.

    Args:
        expert_parallel: over how many ranks the experts are spread.
        options: for `train_pair()`.
    """
    sizes = _share_rows(expert_parallel)
    return train_pair(steps_of=_same_on_all, sequence_parallel=True, **sizes, **options)


def _share_rows(expert_parallel: int) -> dict[str, int]:
    """Makes all ranks tensor-parallel ones. Returns the sizes for the model's config."""
    from megatron.core import parallel_state

    ranks = distributed.get_world_size()
    sizes = {
        "tensor_model_parallel_size": ranks,
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": 1,
    }
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    return sizes


def _same_on_all(count: int, *, seed: int, misfits: bool) -> list[list[Micro]]:
    return parallel_jobs.steps_of(count, misfits=misfits)


def assert_valid_rows_alone_are_routed(*, mode: str, expert_parallel: int, **options: Any) -> None:
    """What the experts of all ranks count is what the documents' rows have chosen, whatever the tail."""
    changes = {**_share_rows(expert_parallel), **options}
    micros = [Micro(lengths=(20, 8), tail=10, seed=1), Micro(lengths=(10, 4), seed=2)]
    with moe_rig.experts_on_cpu():
        config = graph_config(mode=mode, cuda_graph_modules=("attn", "moe_router"))
        run = moe_rig.run(config, "EE", [micros] * 3, sequence_parallel=True, **changes)
    for step in run.steps:
        for counts in step.counts:
            distributed.all_reduce(counts)
            assert int(counts.sum()) == 2 * (20 + 8 + 10 + 4)
