# SPDX-License-Identifier: Apache-2.0
"""Rows sorted by expert, and matrix products over them whose sizes only the device knows.

Nothing here reads a count on the host: buffers hold rows x top-k rows whatever the routing is, offsets say
where each expert's end, and what lies past the last one is never read. Does not choose experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["GroupedLinear", "SortedRows"]


def _summed(sorted_rows: Tensor, places: Tensor, offsets: Tensor) -> Tensor:
    """Each row's sum over its places, zeros for a row of no expert, [rows, H]; bfloat16 is rounded once.

    Rows past the last offset, which no product has written, become zeros: nobody has a use for them.
    """
    sorted_rows = sorted_rows.contiguous()
    torch.ops.megagraph.zero_tail_([sorted_rows], offsets)
    if places.size(1) == 1:
        return sorted_rows.index_select(0, places[:, 0])
    return F.embedding_bag(places, sorted_rows, mode="sum")


class _Move(torch.autograd.Function):
    """Copies rows to their places, or sums what lies there for each row: one's gradient is the other.

    Sums have one order, where atomics have none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor, offsets: Tensor, to_rows: bool) -> Tensor:
        ctx.save_for_backward(rows, places, offsets)
        ctx.to_rows = to_rows
        return _summed(x, places, offsets) if to_rows else x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, places, offsets = ctx.saved_tensors
        of_x = grad.index_select(0, rows) if ctx.to_rows else _summed(grad, places, offsets)
        return of_x, None, None, None, None


class _PermuteProbs(torch.autograd.Function):
    """The probabilities of the sorted rows; those of experts that were not chosen get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, picks: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(picks, offsets)
        ctx.shape = probs.shape
        return probs.reshape(-1).index_select(0, picks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        picks, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        torch.ops.megagraph.zero_tail_([grad], offsets)
        # One-dimensional: of two dimensions, deterministic algorithms would make this many launches.
        return grad.new_zeros(ctx.shape.numel()).scatter_(0, picks, grad).view(ctx.shape), None, None


@dataclass(frozen=True, kw_only=True)
class SortedRows:
    """Where the rows of a pack lie when they are sorted by expert; each has `topk` places.

    Attributes:
        rows: int64 [T * topk], which row is in each place.
        picks: int64 [T * topk], which of all rows x experts is in each place; of a row of no expert any.
        places: int64 [T, topk], the places of each row. Rows of no expert come last, past the offsets.
        offsets: int32 [experts], where the places of each expert end.
    """

    rows: Tensor
    picks: Tensor
    places: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, routing_map: Tensor, topk: int) -> "SortedRows":
        """Sorts by the choices of a router. Does not check them.

        Args:
            routing_map: bool [T, experts]; in each row either `topk` are True or none.
            topk: choices of a row.
        """
        experts = routing_map.size(1)
        numbers = torch.arange(experts, dtype=torch.int16, device=routing_map.device)
        # One past the last expert sorts behind all of them.
        numbered = torch.where(routing_map, numbers, torch.full_like(numbers, experts))
        chosen = numbered.topk(topk, dim=1, largest=False, sorted=True).values
        in_order, order = chosen.view(-1).sort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        rows = order.div(topk, rounding_mode="floor")
        return cls(
            rows=rows,
            picks=rows * experts + in_order.clamp(max=experts - 1),
            places=places.view(-1, topk),
            offsets=torch.searchsorted(in_order, numbers, right=True, out_int32=True),
        )

    def permute(self, x: Tensor) -> Tensor:
        """Rows [T, H] to [T * topk, H], those of one expert together. Differentiable once.

        Past the last offset lie rows of no expert, whose gradient is zero, whatever comes back for them.
        """
        return self._moved(x, to_rows=False)

    def permute_probs(self, probs: Tensor) -> Tensor:
        """Probabilities [T, experts] to those of the places, [T * topk]. Differentiable once."""
        out: Tensor = _PermuteProbs.apply(probs, self.picks, self.offsets)  # type: ignore[no-untyped-call]
        return out

    def combine(self, y: Tensor) -> Tensor:
        """[T * topk, H] back to [T, H]: sums over the places of each row. Differentiable once.

        Overwrites rows of `y` past the last offset with zeros, so that what nobody has written there
        reaches no result.
        """
        return self._moved(y, to_rows=True)

    def _moved(self, x: Tensor, to_rows: bool) -> Tensor:
        out: Tensor = _Move.apply(x, self.rows, self.places, self.offsets, to_rows)  # type: ignore[no-untyped-call]
        return out


class GroupedLinear(nn.Module):
    """One linear layer for each expert, without biases, over rows sorted by expert.

    `torch._grouped_mm` with offsets on the device: bfloat16 on a GPU of compute capability 8.0 or later; also
    float32 on the CPU, where it loops over experts. An expert without rows has a weight gradient of zeros.

    Args:
        experts: how many.
        in_features: columns of the input; a multiple of 8 in bfloat16.
        out_features: likewise, of the output.
        dtype: of the weight.
        device: of the weight.

    Attributes:
        weight: [experts, out_features, in_features], not initialized.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str | int,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(experts, out_features, in_features, dtype=dtype, device=device)
        )

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Multiplies the rows of each expert with its weight.

        Args:
            x: [R, in_features], sorted by expert.
            offsets: int32 [experts], where the rows of each end.

        Returns:
            [R, out_features]. Rows at or past the last offset are not written: they hold anything. So do
            those of the gradient of `x`.

        Raises:
            ValueError: on a GPU in another dtype than bfloat16, in which torch would wait for the offsets.
        """
        if x.is_cuda and x.dtype is not torch.bfloat16:
            raise ValueError(f"GroupedLinear: expected bfloat16 on a GPU, got {x.dtype}")
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=offsets)

    def extra_repr(self) -> str:
        experts, out_features, in_features = self.weight.shape
        return f"{experts} experts, {in_features} -> {out_features}"
