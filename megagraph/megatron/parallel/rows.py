# SPDX-License-Identifier: Apache-2.0
"""Rows of hidden states that ranks share evenly, handed round where their number changes.

Of T rows, rank r of n has those from r*T/n on. Rows are added, or dropped, behind the last one of the last
rank, so that the others have other owners.
"""

from typing import Any

import torch
from torch import Tensor, distributed

__all__ = ["shared_anew", "splits"]


def _overlap(holder: int, held: int, taker: int, taken: int) -> int:
    """How many of the rows that one rank holds another one is to have."""
    first, end = max(holder * held, taker * taken), min((holder + 1) * held, (taker + 1) * taken)
    return max(0, end - first)


def splits(given: int, wanted: int, rank: int, size: int) -> tuple[list[int], list[int]]:
    """How many rows a rank sends to each rank, and how many it gets from each.

    Args:
        given: rows on each rank.
        wanted: rows on each rank afterwards.
        rank: the rank.
        size: how many ranks there are.
    """
    sent = [_overlap(rank, given, peer, wanted) for peer in range(size)]
    return sent, [_overlap(peer, given, rank, wanted) for peer in range(size)]


class _SharedAnew(torch.autograd.Function):
    """Moves rows, and their gradients the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, wanted: int, group: Any) -> Tensor:
        ctx.given, ctx.group = rows.size(0), group
        sent, got = splits(ctx.given, wanted, distributed.get_rank(group), distributed.get_world_size(group))
        moved = rows.new_empty(wanted, *rows.shape[1:])
        moved[sum(got) :].zero_()
        mine = rows[: sum(sent)].contiguous()
        distributed.all_to_all_single(moved[: sum(got)], mine, got, sent, group=group)
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows = _SharedAnew.apply(gradients[0], ctx.given, ctx.group)  # type: ignore[no-untyped-call]
        return rows, None, None


def shared_anew(rows: Tensor, wanted: int, group: Any) -> Tensor:
    """This rank's rows once every rank of a group has `wanted` of them.

    Rows that are added are zero; rows that are dropped get a gradient of zero. Nothing is computed, rows move
    only. Every rank of the group calls this equally often, and so its backward.

    Args:
        rows: what this rank has, as many as every other.
        wanted: how many it will have.
        group: the ranks, on whose backend the rows move.
    """
    moved: Tensor = _SharedAnew.apply(rows, wanted, group)  # type: ignore[no-untyped-call]
    return moved
