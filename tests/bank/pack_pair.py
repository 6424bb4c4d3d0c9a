# SPDX-License-Identifier: Apache-2.0
"""Layers over packs, under a bank and eager: graphs of one capacity beside the canonical pack."""

from collections.abc import Sequence
from typing import Any

import torch
from bank_pair import WIDTH, MicroBatch, Pair, variant
from offsets import offsets
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.sites import VariantSpec

TOKENS, NUM_SEQS = 10, 4
Kind = _C.SegmentKind

# Lengths of documents, and rows that are given.
PACKS = [([3, 4], 7), ([10], 10), ([1, 0, 2, 3], 9), ([2, 2], 10), ([0], 2), ([5, 1, 1], 7), ([1], 1)]


class DocumentMixer(nn.Module):
    """Adds the mean of a row's document, after a projection. Rows past the pack make one more document."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        starts = cu_seqlens[:-1, None]
        in_document = ((rows >= starts) & (rows < cu_seqlens[1:, None])).to(hidden.dtype)
        projected = torch.tanh(self.project(hidden))
        mean = (in_document @ projected) / in_document.sum(1, keepdim=True).clamp(min=1)
        out: Tensor = hidden + projected + in_document.t() @ mean
        return out


def canonical(hidden: Tensor, end: int, tokens: int = TOKENS) -> Tensor:
    """The same pack in the capacity's rows, with a tail of zeros."""
    kept = hidden[:end]
    return torch.cat([kept, kept.new_zeros(tokens - kept.shape[0], kept.shape[1])])


class PackPair(Pair):
    """A pair whose layers take a pack's offsets; rows past its end are given as NaN."""

    def __init__(
        self,
        device: str,
        layers: Sequence[nn.Module] | None = None,  # mixers by default
        *,
        tokens: int = TOKENS,
        num_seqs: int = NUM_SEQS,
        width: int = WIDTH,
        dtype: torch.dtype = torch.float32,
        num_slots: int = 1,
    ) -> None:
        self.tokens, self.num_seqs, self.width, self.dtype = tokens, num_seqs, width, dtype
        layers = [DocumentMixer() for _ in range(3)] if layers is None else layers
        super().__init__(device, [layer.to(dtype) for layer in layers], num_slots=num_slots)
        self.tokens_seen = torch.zeros(1, dtype=torch.int64, device=device)

    def variant(self, key: str = "train", **changes: Any) -> VariantSpec:
        """One capacity."""
        example = offsets([3, 4], self.device, self.num_seqs + 1)
        arguments: dict[str, Any] = {
            "rows": self.tokens,
            "row_shape": (self.width,),
            "dtype": self.dtype,
            "fewer_rows": True,
            "metadata": {
                "cu_seqlens": _C.MetadataSpec(kind=Kind.OFFSETS, example=example, source=0),
                "tokens_seen": _C.MetadataSpec(
                    kind=Kind.COUNT, example=self.tokens_seen, source=0, shared=True
                ),
            },
            "end_source": 0,
            "end_buffer": "cu_seqlens",
            "arguments": lambda buffers: {"cu_seqlens": buffers["cu_seqlens"]},
        }
        return variant(key, **{**arguments, **changes})

    def capture(self, *variants: VariantSpec) -> "PackPair":
        super().capture(*(variants or [self.variant()]))
        return self

    def pack(self, lengths: Sequence[int], rows: int | None = None, **how: Any) -> MicroBatch:
        """A forward of one pack through both."""
        end = sum(lengths)
        hidden = torch.randn(rows or self.tokens, self.width, device=self.device).to(self.dtype)
        hidden[end:] = torch.nan

        def eager(given: Tensor) -> Tensor:
            out = canonical(given, end, self.tokens)
            for layer in self.eager_layers:
                out = layer(out, offsets(lengths, self.device, self.num_seqs + 1))
            return out

        return self.forward(hidden, sources=[offsets(lengths, self.device)], eager=eager, **how)
