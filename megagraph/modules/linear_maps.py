# SPDX-License-Identifier: Apache-2.0
"""Moves of rows that autograd knows by their adjoint, since its own would add with atomics."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["linear_map"]


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.back = back
        out: Tensor = there(x, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        return ctx.back(grad, *tensors), None, None, *(None for _ in tensors)


def linear_map(x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *maps: Tensor) -> Tensor:
    """Applies `there(x, *maps)`, whose gradient is `back(grad, *maps)`. Differentiable once, in x only."""
    out: Tensor = _LinearMap.apply(x, there, back, *maps)  # type: ignore[no-untyped-call]
    return out
