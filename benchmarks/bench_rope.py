# SPDX-License-Identifier: Apache-2.0
"""RoPE of packs against a device copy of as many bytes: those that the work reads and writes, without tables.

`rope_thd` rotates q and k. Ours and the copy are timed alike, in turns, between events.
"""

import itertools
from functools import partial

import torch
from torch import Tensor

from benchmarks.measuring.clocks import Call, copy_of, device_us
from benchmarks.measuring.results import Figure, timed_ratio
from benchmarks.subjects.packs import lognormal_offsets
from megagraph.packs import ops

DEVICE = "cuda"
HEADS, HEAD_DIM, MIB = ((32, 8), (16, 4)), 128, (64, 160, 320)  # of q and k
BAR = 0.92  # of a copy's bandwidth
LAYOUTS: dict[str, ops.RopeLayout] = {"NeoX": "neox", "interleaved": "interleaved"}


def _random(tokens: int, heads: int) -> Tensor:
    return torch.randn(tokens, heads, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)


def _figures_of(heads: tuple[int, int], mib: int) -> list[Figure]:
    row_bytes = sum(heads) * HEAD_DIM * 2
    tokens = -(-(mib << 20) // row_bytes // 16) * 16  # rows of at least so many MiB; a multiple of 16
    cu_seqlens, pair = lognormal_offsets(tokens, device=DEVICE), [_random(tokens, count) for count in heads]
    inverse = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
    positions = torch.arange(int(cu_seqlens.diff().max()), device=DEVICE, dtype=torch.float32)
    half, copying = torch.outer(positions, inverse), copy_of(tokens * row_bytes)
    figures: list[Figure] = []
    for cold, (name, layout) in itertools.product((False, True), LAYOUTS.items()):
        interleaved = layout == "interleaved"
        angles = half.repeat_interleave(2, 1) if interleaved else torch.cat((half, half), -1)
        how = (pair, angles.cos().bfloat16(), angles.sin().bfloat16(), cu_seqlens)
        calls: dict[str, Call] = {
            "forward": partial(ops.rope_thd, *how, layout=layout),
            "backward": partial(torch.ops.megagraph.rope_thd_backward, *how, interleaved=interleaved),
        }
        for direction, call in calls.items():
            ours, copy = device_us((call, copying), cold=cold)
            where = f"{heads[0]}+{heads[1]} heads, {tokens} tokens, {mib} MiB, {name}, {direction}"
            title = f"{where}, {'cold' if cold else 'warm'}: share of a copy's bandwidth"
            figures.append(timed_ratio(title, copy, ours, "share", bar=BAR, better="higher", floor=1.0))
    return figures


FIGURES = {
    f"{heads}, {mib} MiB": partial(_figures_of, heads, mib) for heads, mib in itertools.product(HEADS, MIB)
}
