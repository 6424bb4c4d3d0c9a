# SPDX-License-Identifier: Apache-2.0
"""Models whose MLPs read the padding mask, as routers of experts do."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import entry_jobs
import megatron_rig as rig
import parallel_jobs
import torch
from torch import Tensor


@contextlib.contextmanager
def mlps_that_read_masks() -> Iterator[list[Tensor]]:
    """While inside, masked rows of an MLP count half. Yields copies, on the host, of the masks seen."""
    from megatron.core.transformer.mlp import MLP

    original, seen = MLP.forward, []

    def forward(mlp: Any, hidden_states: Tensor, *args: Any, padding_mask: Any = None, **further: Any) -> Any:
        out, bias = original(mlp, hidden_states, *args, **further)
        if padding_mask is None:
            return out, bias
        if not (padding_mask.is_cuda and torch.cuda.is_current_stream_capturing()):
            seen.append(padding_mask.to("cpu", copy=True))  # memory of a call may not be kept
        assert padding_mask.shape == (1, out.size(0))
        # The mask itself is kept for the backward pass.
        return out.masked_fill(padding_mask.bool().transpose(0, 1)[..., None], 0) + 0.5 * out, bias

    with mock.patch.object(MLP, "forward", forward):
        yield seen


def train_pair(**options: Any) -> dict[str, Any]:
    """As `parallel_jobs.train_pair()`, with masks that change in each micro-batch."""
    with mlps_that_read_masks() as seen:
        report = parallel_jobs.train_pair(steps_of=partial(parallel_jobs.steps_of, masks=True), **options)
    assert len({mask.size(1) for mask in seen}) == 1  # rows of the capacity, or this rank's share of them
    return report


def left_eager(**options: Any) -> dict[str, Any]:
    """As `entry_jobs.left_eager()`, with masks."""
    micros = rig.Micro(lengths=(40, 24), mask_seed=1), rig.Micro(lengths=(20, 10), mask_seed=2)
    with mlps_that_read_masks():
        return entry_jobs.left_eager(micros=micros, **options)
