# SPDX-License-Identifier: Apache-2.0
"""Offsets of documents and packs of them, for the tests of every floor."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def offsets(lengths: Sequence[int], device: str = "cpu", entries: int | None = None) -> Tensor:
    """Of documents of these lengths, int32; the last one is repeated up to `entries` of them."""
    ends = [0, *accumulate(lengths)]
    if entries is not None:
        ends += ends[-1:] * (entries - len(ends))
    return torch.tensor(ends, dtype=torch.int32, device=device)


@dataclass
class Pack:
    """As the oldest supported release makes packs, without `pad_between_seqs`."""

    qkv_format: str = "thd"
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None


def pack_of(actual: Any, padded: Any = None, **changes: Any) -> Any:
    """Of offsets, or of lengths."""
    actual, padded = (offsets(it) if isinstance(it, list) else it for it in (actual, padded))
    if "max_seqlen_q" not in changes:
        lengths = (actual if padded is None else padded).diff()
        changes |= {"max_seqlen_q": int(lengths.max()) if lengths.numel() else 1}
    fields = {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), actual),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), padded),
        "max_seqlen_kv": changes["max_seqlen_q"],
    }
    made = Pack()
    vars(made).update(fields | changes)
    return made
