# SPDX-License-Identifier: Apache-2.0
"""Reads packs and pads them to a capacity, without waiting for the device.

Works on anything with the fields of Megatron's `PackedSeqParams`; imports no Megatron. Does not
decide which capacity to use.

Words: *actual* offsets bound the valid tokens of each document, *padded* offsets bound its physical
rows; if a pack carries no padded offsets the actual ones are physical.
"""

import enum
from typing import Protocol

from torch import Tensor

__all__ = [
    "PackedSequences",
    "TailConvention",
]


class PackedSequences(Protocol):
    """The fields of Megatron's `PackedSeqParams` that every release has."""

    qkv_format: str | None
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen_q: int | Tensor
    max_seqlen_kv: int | Tensor


class TailConvention(enum.Enum):
    """What the offsets say of the rows between a pack's end and the end of the buffer.

    HIDDEN: nothing; every offset past the last document repeats it. Upstream leaves such rows
        undefined; here every op writes zeros.
    EMPTY_DUMMY: one more document with padded rows and no valid token. Takes a place of `num_seqs`.
    """

    HIDDEN = "hidden"
    EMPTY_DUMMY = "empty-dummy"

    def __init__(self, name: str) -> None:
        self.extra_seqs = int(name == "empty-dummy")  # documents that the convention adds
