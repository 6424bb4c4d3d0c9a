# SPDX-License-Identifier: Apache-2.0
"""Captures attention in a bank for a capacity of documents, as training does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.subjects.inside import bare_loops
from megagraph import _C
from megagraph.bank.bank import Bank
from megagraph.bank.sites import MetadataSpec, SiteSpec, VariantSpec
from megagraph.packs import ops


class _Attention(nn.Module):
    """Attends with keys and values of its own; the op computes their gradients, too."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, max_seqlen: int) -> None:
        super().__init__()
        self.register_buffer("keys", keys)
        self.register_buffer("values", values)
        self.max_seqlen = max_seqlen

    def forward(self, queries: Tensor, cu_seqlens: Tensor) -> Tensor:
        return ops.varlen_attention(queries, self.keys, self.values, cu_seqlens, self.max_seqlen)


@dataclass(frozen=True)
class CapturedAttention:
    """Graphs of one attention that have staged one pack.

    Args:
        bank: owns them.
        calls: launch them as they are staged, `forward` and `backward`.
    """

    bank: Bank
    calls: dict[str, Callable[[], object]]
    _kept: tuple[object, ...]  # the module, and the boundaries' holders


def captured_attention(
    inputs: Sequence[Tensor], cu_seqlens: Tensor, num_seqs: int, max_seqlen: int
) -> CapturedAttention:
    """Captures for `num_seqs` documents of up to `max_seqlen` tokens, and runs one pack.

    Args:
        inputs: queries, keys, values, gradient of the output, [T, heads, dim] each.
        cu_seqlens: of the pack, int32 [documents + 1].
        num_seqs: document slots.
        max_seqlen: of the longest document that fits.
    """
    queries, keys, values, grad = inputs
    module = _Attention(keys, values, max_seqlen)
    bank = Bank(str(queries.device))
    chain = bank.add_chain([SiteSpec(name="attention", module=module)])
    example = ops.pad_cu_seqlens(cu_seqlens, num_seqs)
    variant = VariantSpec(
        key="pack",
        training=True,
        rows=queries.size(0),
        row_shape=tuple(queries.shape[1:]),
        dtype=queries.dtype,
        metadata={"cu_seqlens": MetadataSpec(kind=_C.SegmentKind.OFFSETS, example=example, source=0)},
        arguments=lambda buffers: {"cu_seqlens": buffers["cu_seqlens"]},
    )
    bank.capture({chain: [variant]})
    leaf = queries.clone().requires_grad_()
    with torch.enable_grad(), chain.micro_batch("pack", [cu_seqlens]) as reason:
        if reason is not None:
            raise RuntimeError(f"expected a replay, got {reason.name}")
        out = chain(leaf)
    out.backward(grad)
    forward, backward = bare_loops(chain, "pack")
    return CapturedAttention(bank, {"forward": forward, "backward": backward}, (module, chain))
