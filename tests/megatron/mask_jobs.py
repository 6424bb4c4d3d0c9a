# SPDX-License-Identifier: Apache-2.0
"""Models whose MLPs read the padding mask, as routers of experts do."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import megatron_rig as rig
import parallel_jobs
import torch
from same_bits import assert_same_bits
from torch import Tensor

import megagraph
from megagraph.bank.capture import CapturePlan
from megagraph.demo.trainer import Trainer


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
        report = parallel_jobs.train_pair(masks=True, **options)
    assert len({mask.size(1) for mask in seen}) == 1  # rows of the capacity, or this rank's share of them
    return report


def left_eager(*, transformer: dict[str, Any]) -> dict[str, Any]:
    """Steps of a model of whose layers none can be captured, which must leave what Megatron alone leaves."""
    micros = [rig.Micro(lengths=(40, 24), mask_seed=1), rig.Micro(lengths=(20, 10), mask_seed=2)]
    with mlps_that_read_masks():
        megagraph.install(rig.graph_config())
        with mock.patch.object(CapturePlan, "_empty_rows", side_effect=RuntimeError("nobody captures")):
            trainer = Trainer(parallel_jobs.OPTIONS, config=transformer)
            found = [rig.step(trainer, micros, update=False) for _ in range(3)]
        report = rig.report_of(trainer)
        megagraph.uninstall()
        assert_same_bits(found[-1], rig.step(trainer, micros, update=False))
    return report
