# SPDX-License-Identifier: Apache-2.0
"""Offsets of packs whose documents have lognormal lengths, and packs that are full."""

import torch
from torch import Tensor

from megagraph.demo.lengths import lognormal_lengths
from megagraph.demo.packers import Pack


def lognormal_offsets(tokens: int, documents: int, *, device: str = "cuda") -> Tensor:
    """Offsets of `documents` documents that fill `tokens` rows exactly; the same at every call.

    Args:
        tokens: at least 16 for each document.
        documents: at least 1.
        device: of the result.

    Returns:
        int32 [documents + 1], strictly increasing.
    """
    mean = tokens // documents
    lengths = lognormal_lengths(
        documents, mean=mean, sigma=1.0, minimum=max(mean // 8, 1), maximum=8 * mean, seed=7
    )
    ends = lengths.cumsum(0).double() / int(lengths.sum()) * tokens
    offsets = torch.cat([torch.zeros(1, dtype=torch.float64), ends]).round().to(torch.int32)
    assert int(offsets[-1]) == tokens and int(offsets.diff().min()) > 0, offsets
    return offsets.to(device)


def filled(pack: Pack, tokens: int) -> Pack:
    """The pack with one more document that fills it, or itself where it is full.

    Args:
        pack: of at most `tokens` tokens.
        tokens: of the full pack.
    """
    missing = tokens - pack.num_tokens
    if missing == 0:
        return pack
    further = torch.arange(missing) % 256
    return Pack(
        tokens=torch.cat([pack.tokens, further]),
        cu_seqlens=torch.cat([pack.cu_seqlens, pack.cu_seqlens.new_tensor([tokens])]),
        max_seqlen=max(pack.max_seqlen, missing),
    )
