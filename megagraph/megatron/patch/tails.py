# SPDX-License-Identifier: Apache-2.0
"""Zeros in rows past a canonical pack's end, around kernels that leave them as they find them."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["end_of_rows", "without_gradient_tail", "without_tail"]


class _Untailed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (offsets,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        torch.ops.megagraph.zero_tail_([grad], offsets)
        return grad, None


def end_of_rows(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Offsets whose last one is where this rank's rows of a pack end, int32.

    Args:
        cu_seqlens: of the whole pack, int32 [N + 1].
        cp_size: ranks that share its rows.
    """
    return cu_seqlens if cp_size == 1 else cu_seqlens[-1:] // cp_size


def without_gradient_tail(t: Tensor, offsets: Tensor) -> Tensor:
    """Passes rows [T, ...] on as they are; those of their gradient past the last offset become zero."""
    out: Tensor = _Untailed.apply(t, offsets)  # type: ignore[no-untyped-call]  # torch's
    return out


def without_tail(t: Tensor, offsets: Tensor) -> Tensor:
    """The same rows [T, ...], contiguous, with zeros past the last offset.

    In place, and in what a backward may have kept of them, which reads no such row.
    """
    torch.ops.megagraph.zero_tail_([t.data], offsets)
    return t
