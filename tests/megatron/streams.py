# SPDX-License-Identifier: Apache-2.0
"""Megatron's random streams, of which some modules draw their weights, and its process groups."""

import functools
from collections.abc import Callable
from typing import Any


def seed_streams() -> None:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7, force_reset_rng=True)


def seeded(make: Callable[..., Any], seed: Callable[[], Any] = seed_streams) -> Callable[..., Any]:
    """What makes the same with new streams each time."""

    @functools.wraps(make)
    def made(*args: Any, **given: Any) -> Any:
        seed()
        return make(*args, **given)

    return made


def make_groups(**sizes: Any) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    seed_streams()


def makes_groups(job: Callable[..., Any]) -> Callable[..., Any]:
    """What ranks run without any groups of Megatron's, since it makes its own: there are thirty."""
    vars(job)["makes_groups"] = True
    return job
