# SPDX-License-Identifier: Apache-2.0
"""Which document each row is of, for Mamba's mixers in releases whose packs do not say it.

Such a mixer makes it of the offsets in each call, by an op that waits for the device for its length. Packs
that are neither captured nor canonical keep Megatron's own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megagraph.megatron.graphs.positions import rows_are_positions

__all__ = ["documents_of_rows", "wrap_documents"]


def documents_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """The document of each row, int32 [1, rows]; rows past the last offset have the number after the last.

    Never waits for the device, and has the values of Megatron's.

    Args:
        offsets: int32 [documents + 1], the first of them 0.
        rows: physical ones of the pack.
    """
    row = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:], row, right=True, out_int32=True)[None]


def wrap_documents(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps what a mixer asks for the documents of a pack's rows."""

    @functools.wraps(original)
    def create_packed_seq_idx(mixer: Any, packed_seq_params: Any, total_tokens: int) -> Tensor:
        padded = packed_seq_params.cu_seqlens_q_padded
        offsets = packed_seq_params.cu_seqlens_q if padded is None else padded
        if rows_are_positions(offsets) is None:  # the mark of a canonical pack
            return original(mixer, packed_seq_params, total_tokens)
        return documents_of_rows(offsets, total_tokens)

    return create_packed_seq_idx
