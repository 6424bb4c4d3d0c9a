# SPDX-License-Identifier: Apache-2.0
"""`varlen_attention` against ATen's flash attention called directly, on the same packs.

GPU time is that of a graph of the call, as it runs in training: no host in between. Both are timed in
turns, and the medians over all turns are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring.children import Answer, Parts, try_part
from benchmarks.measuring.clocks import Call, device_us, kernel_us
from benchmarks.measuring.results import Figure, against, beside_each, timed
from benchmarks.subjects.hosts import recorded
from benchmarks.subjects.inside import bare_loops
from benchmarks.subjects.packs import lognormal_offsets, variant_of
from megagraph import _C
from megagraph.bank.bank import Bank
from megagraph.bank.sites import SiteSpec
from megagraph.packs import ops

DEVICE = "cuda"
ROUNDS = 45
TAIL = 100  # rows past the last document
ATEN = "ATen's flash attention"
TRANSFORMER_ENGINE = "Transformer Engine's DotProductAttention, kernels only"
BAR, PADDING_BAR = 1.02, 1.03
CAPACITY, USED = 256, 10


@dataclass(frozen=True)
class Shape:
    """Of a pack's q, and of its k and v."""

    tokens: int
    heads: int
    groups: int
    dim: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        heads = f"{self.heads} heads" if self.heads == self.groups else f"{self.heads}/{self.groups} heads"
        return f"{self.tokens} tokens, {heads} of {self.dim}, {str(self.dtype).removeprefix('torch.')}"

    def inputs(self) -> list[Tensor]:
        """q, k, v and a gradient of the output."""
        random = partial(torch.randn, device=DEVICE, dtype=self.dtype)
        return [random(self.tokens, n, self.dim) for n in (self.heads, self.groups, self.groups, self.heads)]

    def pack(self, documents: int | None = None) -> tuple[Tensor, int]:
        """Offsets of documents that leave a short tail, by default many, and the longest of them."""
        offsets = lognormal_offsets(self.tokens - TAIL, documents, device=DEVICE)
        return offsets, int(offsets.diff().max())


SHAPES = (
    *(Shape(8192, 16, 16, 64), Shape(8192, 16, 16, 128, torch.float16), Shape(8192, 32, 8, 128)),
    *(Shape(16384, 16, 4, 64), Shape(16384, 32, 32, 64, torch.float16), Shape(16384, 32, 8, 128)),
)
PADDED_SHAPES, RIVAL_SHAPE = (SHAPES[0], SHAPES[-1]), SHAPES[-1]


def ours(inputs: Sequence[Tensor], cu_seqlens: Tensor, longest: int) -> dict[str, Call]:
    q, k, v, grad = inputs
    packed = (cu_seqlens, cu_seqlens, longest, longest)
    out, lse = torch.ops.megagraph.varlen_attention(q, k, v, *packed)
    backward = torch.ops.megagraph.varlen_attention_backward
    again = partial(backward, grad, q, k, v, out, lse, *packed)
    return {"forward": lambda: ops.varlen_attention(q, k, v, cu_seqlens, longest), "backward": again}


def atens(inputs: Sequence[Tensor], cu_seqlens: Tensor, longest: int) -> dict[str, Call]:
    """ATen's forward and backward, which leave the tail unwritten."""
    q, k, v, grad = inputs
    scale, ends = q.size(2) ** -0.5, (cu_seqlens, cu_seqlens, longest, longest, 0.0, True)
    attend = torch.ops.aten._flash_attention_forward.default
    forward = partial(attend, q, k, v, *ends, False, scale=scale)
    out, lse, state, unused, _ = forward()
    backward = torch.ops.aten._flash_attention_backward.default
    again = partial(backward, grad, q, k, v, out, lse, *ends, state, unused, scale=scale)
    return {"forward": forward, "backward": again}


class Captured:
    """Graphs of an attention in a bank, for `num_seqs` documents; `calls` launch them on one staged pack."""

    def __init__(self, inputs: Sequence[Tensor], cu_seqlens: Tensor, num_seqs: int, max_seqlen: int) -> None:
        queries, keys, values, grad = inputs

        def attend(_owner: nn.Module, queries: Tensor, cu_seqlens: Tensor) -> Tensor:
            return ops.varlen_attention(queries, keys, values, cu_seqlens, max_seqlen)

        owner = nn.Module()
        bank = Bank([SiteSpec(name="attention", module=owner, forward=attend)], str(queries.device))
        example, kind = torch.ops.megagraph.pad_cu_seqlens(cu_seqlens, num_seqs), _C.SegmentKind.OFFSETS
        metadata = {"cu_seqlens": _C.MetadataSpec(kind=kind, example=example, source=0)}
        arguments: dict[str, Any] = {"arguments": lambda buffers: {"cu_seqlens": buffers["cu_seqlens"]}}
        bank.capture([variant_of(queries, metadata=metadata, **arguments)])
        leaf = queries.clone().requires_grad_()
        with torch.enable_grad(), bank.micro_batch("pack", [cu_seqlens]) as reason:
            if reason is not None:
                raise RuntimeError(f"expected a replay, got {reason.name}")
            out = bank.replay_all(leaf)
        out.backward(grad)
        self._kept = bank, owner
        self.calls = dict(zip(("forward", "backward"), bare_loops(bank, "pack"), strict=True))


def gpu_us(*calls: Call) -> list[list[float]]:
    """GPU time of each call in a graph, in turns."""
    return device_us([recorded(call) for call in calls], repeats=ROUNDS)


@torch.no_grad()
def _compare(shape: Shape) -> list[Figure]:
    inputs, pack = shape.inputs(), shape.pack()
    mine, theirs, figures = ours(inputs, *pack), atens(inputs, *pack), []
    for direction, call in mine.items():
        us, its = gpu_us(call, theirs[direction])
        figure = timed(f"{shape}, {direction}: GPU time", us, "us")
        figures.append(against(figure, ATEN, its, share=BAR))
    return figures


@torch.no_grad()
def _compare_padded(shape: Shape) -> list[Figure]:
    """Ten documents in graphs of 256, each as long as the longest or the pack, beside graphs of ten."""
    (tight, longest), inputs, figures = shape.pack(USED), shape.inputs(), list[Figure]()
    alone = Captured(inputs, tight, USED, longest)
    for max_seqlen in (longest, shape.tokens):
        many = Captured(inputs, tight, CAPACITY, max_seqlen)
        # What the slots cost in a graph whose grids stay as they were captured.
        fixed = atens(inputs, torch.ops.megagraph.pad_cu_seqlens(tight, CAPACITY), max_seqlen)
        for direction in many.calls:
            us, tight_us = device_us((many.calls[direction], alone.calls[direction]), repeats=ROUNDS)
            title = f"GPU time of {CAPACITY} document slots, {USED} used, max_seqlen {max_seqlen}"
            rival = f"{USED} document slots, max_seqlen {longest}"
            figure = timed(f"{shape}, {direction}: {title}", us, "us")
            beside_aten = replace(figure, name=f"{figure.name}, beside ATen alone")
            figures += [
                against(figure, rival, tight_us, share=PADDING_BAR),
                against(beside_aten, ATEN, gpu_us(fixed[direction])[0]),
            ]
    return figures


def _rival() -> Answer:
    from transformer_engine.pytorch import DotProductAttention

    shape = RIVAL_SHAPE
    cu_seqlens, longest = shape.pack()
    *leaves, grad = shape.inputs()
    for leaf in leaves:
        leaf.requires_grad_()
    of = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "num_gqa_groups": shape.groups}
    ends: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    ends |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    attend = partial(DotProductAttention(shape.heads, shape.dim, **of), *leaves, **ends)

    def both() -> object:
        return torch.autograd.grad(out := attend(), leaves, grad.view(out.shape))

    with torch.no_grad():
        forward = kernel_us(attend)
    return {"forward": forward, "forward and backward": kernel_us(both)}


PARTS: Parts = {TRANSFORMER_ENGINE: _rival}


@torch.no_grad()
def _beside_transformer_engine() -> list[Figure]:
    theirs = try_part(__name__, TRANSFORMER_ENGINE)
    mine = ours(RIVAL_SHAPE.inputs(), *RIVAL_SHAPE.pack())
    forward, backward = gpu_us(mine["forward"], mine["backward"])
    both = [sum(pair) for pair in zip(forward, backward, strict=True)]
    figures = []
    for name, us in {"forward": forward, "forward and backward": both}.items():
        figure = timed(f"{RIVAL_SHAPE}, {name}: GPU time", us, "us")
        figures += beside_each(figure, {TRANSFORMER_ENGINE: theirs}, name)
    return figures


FIGURES = {
    **{f"{shape}, GPU time": partial(_compare, shape) for shape in SHAPES},
    **{f"{shape}, padded": partial(_compare_padded, shape) for shape in PADDED_SHAPES},
    f"{RIVAL_SHAPE}, rivals": _beside_transformer_engine,
}
