# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Megatron's distributed optimizer, which refuses the CPU."""

from typing import Any

import torch


class ShardedSGD:
    """Updates this rank's shard of each parameter buffer; the others are those of before until the gather."""

    def __init__(self, model: Any) -> None:
        self._buffers = [*model.buffers, *model.expert_parallel_buffers]

    def zero_grad(self) -> None:
        """Gradients live in the buffers, which the schedule's caller zeroes."""

    def step(self) -> None:
        """One step; the gather of the parameters is left to the next forward pass."""
        with torch.no_grad():
            for buffer in self._buffers:
                size, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
                for bucket in buffer.buckets:
                    shards = bucket.param_data.view(size, -1)
                    shards[rank] -= 0.05 * bucket.grad_data.view(size, -1)[rank]
