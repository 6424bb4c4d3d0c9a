# SPDX-License-Identifier: Apache-2.0
"""Rows sorted by expert, and matrix products over them whose sizes only the device knows.

Nothing here reads a count on the host: buffers hold rows x top-k rows whatever the routing is, offsets say
where each expert's end, and what lies past the last one is never read. Does not choose experts.

Note [Made again]
A product keeps its input for the backward: top-k copies of all rows, sorted, or what an activation made of
some. Both are made of what others keep anyway. So the backward can make them again, bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["GroupedLinear", "SortedRows", "linear_map"]


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any, *tensors: Tensor) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.there, ctx.back = there, back
        return there(x, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        return linear_map(grad, ctx.back, ctx.there, *tensors), None, None, *(None for _ in tensors)


def linear_map(x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *maps: Tensor) -> Tensor:
    """Applies `there(x, *maps)`, whose gradient is `back(grad, *maps)`. Differentiable in x only.

    For moves of rows: autograd's own gradient of them would add with atomics.
    """
    return _LinearMap.apply(x, there, back, *maps)  # type: ignore[no-any-return, no-untyped-call]


def _copied(x: Tensor, rows: Tensor, places: Tensor, offsets: Tensor) -> Tensor:
    return x.index_select(0, rows)


def _summed(sorted_rows: Tensor, rows: Tensor, places: Tensor, offsets: Tensor) -> Tensor:
    """Each row's sum over its places, in one order, zeros for a row of no expert; bfloat16 is rounded once.

    Rows past the last offset, which no product has written, become zeros: nobody has a use for them.
    """
    sorted_rows = sorted_rows.contiguous()
    torch.ops.megagraph.zero_tail_([sorted_rows], offsets)
    if places.size(1) == 1:
        return sorted_rows.index_select(0, places[:, 0])
    return F.embedding_bag(places, sorted_rows, mode="sum")


@dataclass(frozen=True, kw_only=True)
class SortedRows:
    """Where the rows of a pack lie when they are sorted by expert; each has `topk` places."""

    rows: Tensor  # int64 [T * topk], which row is in each place
    picks: Tensor  # int64 [T * topk], which of all rows x experts is there; of a row of no expert any
    places: Tensor  # int64 [T, topk], the places of each row; of no expert they come last, past the offsets
    offsets: Tensor  # int32 [experts], where the places of each expert end

    @classmethod
    def of(cls, routing_map: Tensor, topk: int) -> "SortedRows":
        """Sorts by a router's choices, bool [T, experts]: `topk` in each row or none; not checked."""
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
        """Rows [T, H] to [T * topk, H], those of one expert together.

        Past the last offset lie rows of no expert. What comes back for them is overwritten with zeros: no
        other tensor may have the same gradient.
        """
        return linear_map(x, _copied, _summed, self.rows, self.places, self.offsets)

    def permute_probs(self, probs: Tensor) -> Tensor:
        """Probabilities [T, experts] to those of the places, [T * topk].

        Those of experts that were not chosen get a gradient of zero.
        """
        shape = probs.shape

        def picked(probs: Tensor, picks: Tensor, _offsets: Tensor) -> Tensor:
            return probs.reshape(-1).index_select(0, picks)

        def put_back(grad: Tensor, picks: Tensor, offsets: Tensor) -> Tensor:
            grad = torch.ops.megagraph.zero_tail(grad, offsets, len(grad))
            # One-dimensional: of two dimensions, deterministic algorithms would make this many launches.
            return grad.new_zeros(shape.numel()).scatter_(0, picks, grad).view(shape)

        return linear_map(probs, picked, put_back, self.picks, self.offsets)

    def combine(self, y: Tensor) -> Tensor:
        """[T * topk, H] back to [T, H]: sums over the places of each row.

        Overwrites rows of `y` past the last offset with zeros, so that what nobody has written there
        reaches no result.
        """
        return linear_map(y, _summed, _copied, self.rows, self.places, self.offsets)


class GroupedLinear(nn.Module):
    """One linear layer for each expert, without biases, over rows sorted by expert.

    `torch._grouped_mm` with offsets on the device: bfloat16 on a GPU of compute capability 8.0 or later, of
    features that are multiples of 8; also float32 on the CPU, where it loops over experts. An expert without
    rows has a weight gradient of zeros.

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
        weight = torch.empty(experts, out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Multiplies the rows [R, in_features] of each expert with its weight, to [R, out_features].

        They are sorted by expert, and those of each end at its offset, int32 [experts]. Rows at or past the
        last one are not written: they hold anything. So do those of the gradient of `x`.

        Raises:
            ValueError: on a GPU in another dtype than bfloat16, in which torch would wait for the offsets.
        """
        weight: Tensor = self.weight
        device = x.device.type
        if torch.is_autocast_enabled(device):  # which casts for products that it knows
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), weight.to(dtype)
        if x.is_cuda and x.dtype is not torch.bfloat16:
            raise ValueError(f"GroupedLinear: expected bfloat16 on a GPU, got {x.dtype}")
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets)

    def of_made(self, offsets: Tensor, make: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """Multiplies `make(*given)`, which the backward makes again: Note [Made again].

        Under autocast, which no backward runs under, it is kept.
        """
        x, kept = make(*given), [tensor.detach() for tensor in given]
        place, is_kept = (x.data_ptr(), x.shape), torch.is_autocast_enabled(x.device.type)

        def keep(saved: Tensor) -> Any:
            is_other = is_kept or (saved.data_ptr(), saved.shape) != place
            return saved if is_other else [it._version for it in kept]

        def kept_or_made(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            if saved != [it._version for it in kept]:
                raise RuntimeError("GroupedLinear: what its input is made of was written since the forward")
            with torch.no_grad():
                return make(*kept)

        with saved_tensors_hooks(keep, kept_or_made):
            out: Tensor = self(x, offsets)
        return out

    def extra_repr(self) -> str:
        experts, out_features, in_features = self.weight.shape
        return f"{experts} experts, {in_features} -> {out_features}"
