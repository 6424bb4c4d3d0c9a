# SPDX-License-Identifier: Apache-2.0
"""Megatron's random streams, of which some modules draw their weights."""

__all__ = ["seed_streams"]


def seed_streams() -> None:
    """Begins them anew, whichever tests ran before."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
