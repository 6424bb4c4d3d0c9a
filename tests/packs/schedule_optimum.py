# SPDX-License-Identifier: Apache-2.0
"""The best schedule of a few documents, by trying all of them."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from megagraph.packs.schedule import ScheduleLimits

__all__ = ["Optimum", "document_cost", "document_rows", "optimum"]


class Optimum(NamedTuple):
    num_micro_batches: int
    cost: float  # of the costliest rank


def document_rows(length: int, size: int, limits: ScheduleLimits) -> int:
    step = limits.alignment * (1 if size == 1 else 2)
    return -(-length // (size * step)) * step


def document_cost(length: int, size: int, limits: ScheduleLimits) -> float:
    rows = document_rows(length, size, limits)
    attention = length * length / (limits.attention_parity * size)
    return rows + attention + limits.exchange * (rows * (size - 1))


class _Pack:
    def __init__(self, size: int, group: int) -> None:
        self.size, self.group = size, group
        self.rows = self.num = 0

    def state(self) -> tuple[int, int, int, int]:
        return self.size, self.group, self.rows, self.num


def _layouts(limits: ScheduleLimits, num: int) -> list[list[tuple[int, int]]]:
    """How many packs each group may have, so that each rank is in `num`: (size, group), repeated.

    Of layouts that differ by the order of equal neighbours only one is given.
    """

    def below(level: int, left: int) -> list[tuple[tuple[int, ...], ...]]:
        """Of one group of a level: counts by level, each a tuple over the groups within."""
        if level == 0:
            return [((left,),)]
        ratio = limits.cp_sizes[level] // limits.cp_sizes[level - 1]
        found = []
        for own in range(left + 1):
            for parts in itertools.combinations_with_replacement(below(level - 1, left - own), ratio):
                merged = tuple(sum((part[i] for part in parts), ()) for i in range(level))
                found.append((*merged, (own,)))
        return found

    top = len(limits.cp_sizes) - 1
    layouts = []
    for parts in itertools.combinations_with_replacement(
        below(top, num), limits.ranks // limits.cp_sizes[top]
    ):
        layouts.append(
            [
                (size, group)
                for level, size in enumerate(limits.cp_sizes)
                for group, count in enumerate(sum((part[level] for part in parts), ()))
                for _ in range(count)
            ]
        )
    return layouts


def _search(
    lengths: Sequence[int], limits: ScheduleLimits, layout: list[tuple[int, int]], bound: float
) -> float:
    """The least cost of a layout, or `bound` if none is below."""
    packs = [_Pack(size, group) for size, group in layout]
    loads = [0.0] * limits.ranks
    order = sorted(lengths, reverse=True)
    best = bound

    def place(index: int, num_empty: int) -> None:
        nonlocal best
        if len(order) - index < num_empty:
            return
        if index == len(order):
            best = max(loads)
            return
        seen = set()
        for pack in packs:
            if pack.state() in seen:  # packs of one group are alike
                continue
            seen.add(pack.state())
            rows = document_rows(order[index], pack.size, limits)
            if pack.rows + rows > limits.max_seqlen_per_dp_cp_rank or pack.num == limits.max_packed_seqs:
                continue
            cost = document_cost(order[index], pack.size, limits)
            first = pack.group * pack.size
            ranks = range(first, first + pack.size)
            before = [loads[rank] for rank in ranks]
            if max(before) + cost >= best * (1 - 1e-12):
                continue
            for rank in ranks:
                loads[rank] += cost
            pack.rows += rows
            pack.num += 1
            place(index + 1, num_empty - (pack.num == 1))
            pack.rows -= rows
            pack.num -= 1
            loads[first : first + pack.size] = before

    place(0, len(packs))
    return best


def optimum(lengths: Sequence[int], limits: ScheduleLimits, *, at_most: int) -> Optimum | None:
    """The fewest micro-batches that are possible at all, and the least cost with that many."""
    for num in range(limits.micro_batch_multiple, at_most + 1, limits.micro_batch_multiple):
        cost = float("inf")
        for layout in _layouts(limits, num):
            if len(layout) <= len(lengths):
                cost = _search(lengths, limits, layout, cost)
        if cost < float("inf"):
            return Optimum(num, cost)
    return None
