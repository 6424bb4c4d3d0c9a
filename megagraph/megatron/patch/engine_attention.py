# SPDX-License-Identifier: Apache-2.0
"""What runs around Transformer Engine's attention on canonical packs that ranks share.

There it asks each row for its document, and reads past the offsets for rows behind the last one. So it is
given one document more, of the rows behind the pack's end, without a valid token. What it leaves in these
rows, and in their gradients, depends on what the memory held; here they become zero.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from megagraph.megatron.graphs.positions import rows_are_positions
from megagraph.megatron.patch.tails import end_of_rows, without_gradient_tail, without_tail

__all__ = ["wrap_engine_attention"]

_ROWS = ("query", "key", "value")
_PACK, _BETWEEN = "packed_seq_params", "pad_between_seqs"


def wrap_engine_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `TEDotProductAttention.forward`."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(attention: Any, *args: Any, **kwargs: Any) -> Any:
        cp_size = _num_ranks(attention.cp_group)
        if cp_size == 1:
            return original(attention, *args, **kwargs)
        given = signature.bind(attention, *args, **kwargs)
        pack: Any = given.arguments.get(_PACK)
        rows = given.arguments["query"].size(0)
        says_padding = hasattr(pack, _BETWEEN)  # or such a model stays eager, as before megatron-core 0.17
        is_canonical = says_padding and rows_are_positions(pack.cu_seqlens_q) is not None
        if not is_canonical or rows % 2:  # of each document two parts
            return original(attention, *args, **kwargs)
        physical = pack.cu_seqlens_q if pack.cu_seqlens_q_padded is None else pack.cu_seqlens_q_padded
        end = end_of_rows(physical, cp_size)
        given.arguments[_PACK] = _with_tail_as_document(pack, cp_size * rows)
        for name in _ROWS:
            given.arguments[name] = without_gradient_tail(given.arguments[name], end)
        out: Tensor = original(*given.args, **given.kwargs)
        return without_tail(out.contiguous(), end)

    return forward


def _num_ranks(groups: Any) -> int:
    """Of Transformer Engine's group, or of its two nested ones; one without any."""
    if isinstance(groups, distributed.ProcessGroup):
        return groups.size()
    return math.prod(group.size() for group in groups or ())


def _with_tail_as_document(pack: Any, rows: int) -> Any:
    """The pack with one more document, of all rows past its end and of no valid token.

    Args:
        pack: a canonical one.
        rows: of all ranks together.
    """
    actual, padded = pack.cu_seqlens_q, pack.cu_seqlens_q_padded
    other = copy.copy(pack)
    # Unset, it follows from the offsets: whether they are two tensors.
    if pack.pad_between_seqs is None:
        other.pad_between_seqs = padded is not None and padded is not actual
    other.cu_seqlens_q = other.cu_seqlens_kv = torch.cat([actual, actual[-1:]])
    of_rows = actual if padded is None else padded
    last = torch.full_like(of_rows[-1:], rows)
    other.cu_seqlens_q_padded = other.cu_seqlens_kv_padded = torch.cat([of_rows, last])
    return other
