# SPDX-License-Identifier: Apache-2.0
"""What routers of experts use that no module owns: Megatron's metrics, and the scale of its losses."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from megagraph.megatron.seams import moe_metrics

__all__ = ["new_metrics_are_empty", "read_by_routers"]


def read_by_routers(layer: Any) -> Sequence[Tensor]:
    """The tensors that graphs of a layer's router write and read; those of all routers."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    return [*moe_metrics().values(), *(() if scale is None else (scale,))]


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
