# SPDX-License-Identifier: Apache-2.0
"""Attention over a pack that context-parallel ranks share: each attends for its own queries.

Ranks hold their rows in zigzag order (`megagraph.packs.ops.thd_partition_indices`). Nothing here reads the
offsets on the host, so that it can be captured; collectives are torch's, of the group that is given.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from megagraph.packs import ops

__all__ = ["SharedPack", "attend_gathered", "attend_over_heads", "first", "padded"]


@dataclass(frozen=True, kw_only=True)
class SharedPack:
    """A pack, and the ranks that share it.

    Args:
        cu_seqlens: int32 [N + 1], global physical offsets; every document's length is a multiple of twice the
            number of ranks.
        max_seqlen: no document is longer, all ranks together.
        group: the ranks, two or more.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    group: distributed.ProcessGroup

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This one among them."""
        return self.group.rank()


def padded(value: Tensor, dim: int) -> Tensor:
    """Values with zeros up to as many dimensions as keys have."""
    return F.pad(value, (0, dim - value.size(-1))) if value.size(-1) < dim else value


def first(out: Tensor, dim: int) -> Tensor:
    """The first entries of the last dimension; all of them are no view, whose gradient would be a copy."""
    return out if out.size(-1) == dim else out[..., :dim]


class _GatherKeys(torch.autograd.Function):
    """The keys that this rank's queries see, of local rows of all ranks; gradients add up in their order."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, keys: Tensor, places: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(places)
        ctx.group = group
        gathered = local.new_empty(group.size() * local.size(0), *local.shape[1:])
        distributed.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered.index_select(0, keys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        exact = torch.promote_types(grad.dtype, torch.float32)
        # One row more, of zeros: for rows that a chunk does not see.
        seen = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
        of_first, of_second = (seen.index_select(0, of_chunk) for of_chunk in places)
        mine = (of_first.to(exact) + of_second).to(grad.dtype).unflatten(0, (ctx.group.size(), -1))
        return _exchanged(mine, ctx.group).sum(0, dtype=exact).to(grad.dtype), None, None, None


def attend_gathered(
    query: Tensor, key: Tensor, value: Tensor, pack: SharedPack, *, softmax_scale: float | None = None
) -> Tensor:
    """Causal attention for this rank's rows, over keys and values gathered from all ranks.

    Keys and values travel once forward, and their gradients once backward, in their own dtype; the ranks'
    parts of a gradient are summed in the order of the ranks in float32, and rounded once. Every rank does the
    same work, whatever the documents' lengths.

    Args:
        query: [T / c, H, D], this rank's rows of T on c ranks; T is a multiple of 2 * c.
        key: [T / c, G, D] with H a multiple of G.
        value: [T / c, G, V]; V at most D.
        pack: the same on every rank.
        softmax_scale: by default 1 / sqrt(D).

    Returns:
        [T / c, H, V]. The tail is zero, in the gradients as well.

    Raises:
        ValueError: if shapes or (on the CPU only) offsets do not fit.
    """
    size, rank, dim, kept = pack.size, pack.rank, key.size(-1), value.size(-1)
    total = size * query.size(0)
    chunk = -(-pack.max_seqlen // (2 * size))  # of the longest document
    offsets_q, offsets_k, keys, places = ops.thd_context_keys(pack.cu_seqlens, total, size, rank)
    seen = _GatherKeys.apply(torch.cat([key, value], -1), keys, places, pack.group)  # type: ignore[no-untyped-call]
    seen_key, seen_value = seen.split([dim, kept], -1)
    out = ops.varlen_attention_to_keys(
        query,
        seen_key,
        padded(seen_value, dim),
        (offsets_q, chunk),
        (offsets_k, chunk * (2 * size - rank)),
        softmax_scale=softmax_scale,
    )
    return first(out, kept)


class _ExchangeHeads(torch.autograd.Function):
    """Local rows of all heads to all rows of local heads, in the order of documents; or back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, maps: Tensor, group: Any, to_heads: bool) -> Tensor:
        ctx.save_for_backward(maps)
        ctx.group, ctx.to_heads = group, to_heads
        return _to_heads(rows, maps, group) if to_heads else _to_rows(rows, maps, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (maps,) = ctx.saved_tensors
        back = _to_rows if ctx.to_heads else _to_heads
        return back(grad, maps, ctx.group), None, None, None


def _exchanged(parts: Tensor, group: distributed.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts)
    distributed.all_to_all_single(received, parts, group=group)
    return received


def _to_heads(rows: Tensor, maps: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """[T / c, H, D] to [T, H / c, D]."""
    count, heads, dim = rows.shape
    parts = rows.view(count, group.size(), heads // group.size(), dim).transpose(0, 1).contiguous()
    return _exchanged(parts, group).flatten(0, 1).index_select(0, maps[0])


def _to_rows(rows: Tensor, maps: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """[T, H / c, D] to [T / c, H, D]."""
    parts = rows.index_select(0, maps[1]).view(group.size(), -1, *rows.shape[1:])
    return _exchanged(parts, group).transpose(0, 1).flatten(1, 2).contiguous()


def attend_over_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: SharedPack,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention over the whole pack for this rank's share of the heads.

    Queries, keys, values and the output travel once each way.

    Args:
        query: [T / c, H, D], this rank's rows of T on c ranks; H is a multiple of c.
        key: [T / c, G, D]; G is a multiple of c.
        value: [T / c, G, V]; V at most D.
        pack: the same on every rank.
        softmax_scale: by default 1 / sqrt(D).
        causal: as `varlen_attention` has it.

    Returns:
        [T / c, H, V]. The tail is zero, in the gradients as well.

    Raises:
        ValueError: if shapes or (on the CPU only) offsets do not fit.
    """
    for heads, name in ((query.size(1), "query heads"), (key.size(1), "query groups")):
        if heads % pack.size:
            raise ValueError(
                f"attend_over_heads: expected a multiple of {pack.size} {name}, got {heads}; "
                "all_gather takes any number"
            )
    maps = ops.thd_gathered_rows(pack.cu_seqlens, pack.size * query.size(0), pack.size)
    query, key, value = (
        _ExchangeHeads.apply(rows, maps, pack.group, True)  # type: ignore[no-untyped-call]
        for rows in (query, key, value)
    )
    out = ops.varlen_attention(
        query,
        key,
        padded(value, key.size(-1)),
        pack.cu_seqlens,
        pack.max_seqlen,
        softmax_scale=softmax_scale,
        causal=causal,
    )
    out = first(out, value.size(-1))
    made: Tensor = _ExchangeHeads.apply(out, maps, pack.group, False)  # type: ignore[no-untyped-call]
    return made
