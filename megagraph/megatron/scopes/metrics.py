# SPDX-License-Identifier: Apache-2.0
"""What routers of experts use that no module owns: Megatron's metrics, and the scale of its losses."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.megatron.seams import moe_metrics

__all__ = ["make_scale", "new_metrics_are_empty", "read_by_routers"]


def read_by_routers(layer: Any) -> Sequence[Tensor]:
    """The tensors that graphs of a layer's router write and read; those of all routers."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    return [*moe_metrics().values(), *(() if scale is None else (scale,))]


def make_scale(block: nn.Module) -> None:
    """Sets the scale of routers' losses to one where nobody has, in the shape that schedules copy to it.

    A backward would make one without dimensions, to which they cannot.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import Router

    router: Any = next((module for module in block.modules() if isinstance(module, Router)), None)
    if router is not None and MoEAuxLossAutoScaler.main_loss_backward_scale is None:
        MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1, device=router.weight.device)


@contextlib.contextmanager
def new_metrics_are_empty() -> Iterator[None]:
    """Around work that is to leave no trace: metrics that come up inside hold zeros afterwards."""
    before = set(moe_metrics())
    try:
        yield
    finally:
        for name, values in moe_metrics().items():
            if name not in before:
                values.zero_()
