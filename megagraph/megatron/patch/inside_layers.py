# SPDX-License-Identifier: Apache-2.0
"""What runs in place of functions that Megatron's layers call, on canonical packs; others keep Megatron's.

- RoPE inside attention: Megatron's own THD path reads the offsets on the host, which no graph can do, and
  refuses rows past the last one.
- Fused RoPE of multi-latent attention: Megatron's kernels are compiled at their first call, look for a row's
  document from the first one on, and read the row before the table's first for rows past the last offset.
  Ours has their bits on all other rows.
- Transformer Engine's attention, of packs that ranks share: it asks each row for its document, and reads past
  the offsets for rows behind the last one. So it is given one document more, of the rows behind the pack's
  end, without a valid token. What it leaves in these rows, and in their gradients, depends on what the memory
  held; here they become zero. So they do of packs of one rank, if it may choose another kernel than cuDNN's.
- The document of each row, for Mamba's mixers in releases whose packs do not say it: such a mixer makes it of
  the offsets in each call, by an op that waits for the device for its length.
"""

import functools
import importlib.util
import inspect
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from megagraph._C import by_name, is_by_token, is_canonical, with_tail_as_document
from megagraph.megatron.seams import MLA_QUERY_ROPE, ROWS_ROPE, Seam
from megagraph.modules.experts import linear_map
from megagraph.packs.ops import RopeLayout, RotaryTables, rope_mla, rope_thd

__all__ = ["wrap_documents", "wrap_engine_attention", "wrap_foreign_rope", "wrap_mla_rope", "wrap_rope"]

_Function = Callable[..., Any]


def _end_of_rows(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Offsets whose last one is where this rank's rows of a pack end, int32, from those of the whole pack."""
    return cu_seqlens if cp_size == 1 else cu_seqlens[-1:] // cp_size


def _without_tail(t: Tensor, offsets: Tensor) -> Tensor:
    """The same rows [T, ...], contiguous, with zeros past the last offset.

    In place, and in what a backward may have kept of them, which reads no such row.
    """
    torch.ops.megagraph.zero_tail_([(t := t.contiguous()).data], offsets)
    return t


def _without_gradient_tail(t: Tensor, offsets: Tensor) -> Tensor:
    """Passes rows [T, ...] on as they are; those of their gradient past the last offset become zero."""
    return linear_map(t, lambda t, _end: t.view_as(t), lambda grad, end: _without_tail(grad, end), offsets)


_OF_MLA = {"multi_latent_attention", "mla_rotary_interleaved"}  # by release
_KNOWN = {"rotary_interleaved", "mscale", "cp_group", *_OF_MLA}


def wrap_rope(original: _Function) -> _Function:
    """Wraps Megatron's `_apply_rotary_pos_emb_thd`, which reads offsets on the host."""
    tables, names = RotaryTables(), [*inspect.signature(original).parameters][3:]

    def rotate(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, **named: Any) -> Any:
        _rest, how = by_name(names, args, named)
        asks_more = not {name for name, value in how.items() if value} <= _KNOWN
        if how.get("cp_group") is None or asks_more or not is_canonical(cu_seqlens):
            return original(t, cu_seqlens, freqs, **how)
        cp_group, mscale = how.pop("cp_group"), how.get("mscale", 1.0)
        cp_size, cp_rank = cp_group.size(), cp_group.rank()
        if is_by_token(cu_seqlens):
            end = _end_of_rows(cu_seqlens, cp_size)
            rows = _without_gradient_tail(t, end)[:, None]
            return _without_tail(ROWS_ROPE.function()(rows, freqs, **how).squeeze(1), end)
        layout: RopeLayout = "interleaved" if how.get("rotary_interleaved") else "neox"
        if any(how.get(name) for name in _OF_MLA):
            layout = "mla_interleaved"
        by = tables.tables(freqs, t.dtype, mscale)
        return rope_thd([t], *by, cu_seqlens, layout=layout, cp_size=cp_size, cp_rank=cp_rank)[0]

    return rotate


def wrap_foreign_rope(seam: Seam, original: _Function) -> _Function:
    """Wraps Transformer Engine's or a host's: it may leave rows past the last offset as it finds them."""
    _t, *names = seam.takes.split()

    def rotate(t: Tensor, *args: Any, **named: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **named}
        cu_seqlens, cp_group = given.get("cu_seqlens"), named.get("cp_group")
        if cu_seqlens is None or not is_canonical(cu_seqlens):
            return original(t, *args, **named)
        end = _end_of_rows(cu_seqlens, given.get("cp_size", 1) if cp_group is None else cp_group.size())
        return _without_tail(original(_without_gradient_tail(t, end), *args, **named), end)

    return rotate


def wrap_mla_rope(seam: Seam, original: _Function) -> _Function:
    """Wraps fused RoPE of multi-latent attention: ours for canonical packs if nothing further is asked."""
    signature = inspect.signature(original)
    names = seam.takes.split()
    offsets = next(name for name in names if name.startswith("cu_seqlens"))

    def rotate(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        given = bound.arguments
        asks_more = any(value for name, value in given.items() if name not in names)
        if given[offsets] is None or not is_canonical(given[offsets]) or asks_more:
            return original(*args, **named)
        by = given["cos"].flatten(1), given["sin"].flatten(1), given[offsets]
        places = {"cp_size": given["cp_size"], "cp_rank": given["cp_rank"]}
        if seam is MLA_QUERY_ROPE:
            return rope_mla(given["t"], None, None, by, **places)[0]
        return rope_mla(None, given["kv"], given["k_pos_emb"], by, v_dim=given["v_dim"], **places)

    return rotate


@functools.cache
def _has_flash_attn() -> bool:
    names = "flash_attn", "flash_attn_3", "flash_attn_interface"
    return any(importlib.util.find_spec(name) is not None for name in names)


def _may_leave_tails() -> bool:
    """Whether kernels may be chosen that leave rows past the last offset as they find them, there or back."""
    may_flash = os.environ.get("NVTE_FLASH_ATTN") != "0" and _has_flash_attn()
    return may_flash or os.environ.get("NVTE_FUSED_ATTN") == "0"


def wrap_engine_attention(original: _Function) -> _Function:
    """Wraps `TEDotProductAttention.forward`."""
    signature = inspect.signature(original)

    def forward(attention: Any, *args: Any, **kwargs: Any) -> Any:
        found = attention.cp_group  # one, or two nested ones
        groups = [found] if isinstance(found, distributed.ProcessGroup) else found or ()
        cp_size = math.prod(group.size() for group in groups)
        if cp_size == 1 and not _may_leave_tails():
            return original(attention, *args, **kwargs)
        given = signature.bind(attention, *args, **kwargs)
        pack: Any = given.arguments.get("packed_seq_params")
        rows = given.arguments["query"].size(0)
        # Or such a model stays eager, as before megatron-core 0.17.
        has_tail = cp_size == 1 or (hasattr(pack, "pad_between_seqs") and rows % 2 == 0)  # two parts each
        if pack is None or not has_tail or not is_canonical(pack.cu_seqlens_q):
            return original(attention, *args, **kwargs)
        physical = pack.cu_seqlens_q if pack.cu_seqlens_q_padded is None else pack.cu_seqlens_q_padded
        end = _end_of_rows(physical, cp_size)
        if cp_size > 1:
            given.arguments["packed_seq_params"] = with_tail_as_document(pack, cp_size * rows)
        for name in ("query", "key", "value"):
            given.arguments[name] = _without_gradient_tail(given.arguments[name], end)
        return _without_tail(original(*given.args, **given.kwargs), end)

    return forward


def wrap_documents(original: _Function) -> _Function:
    """Wraps what a mixer asks for the document of each row, int32 [1, rows].

    Ours never waits for the device; rows past the last offset have the number after the last document's.
    """

    def create_packed_seq_idx(mixer: Any, packed_seq_params: Any, total_tokens: int) -> Any:
        padded = packed_seq_params.cu_seqlens_q_padded
        offsets = packed_seq_params.cu_seqlens_q if padded is None else padded
        if not is_canonical(offsets):
            return original(mixer, packed_seq_params, total_tokens)
        row = torch.arange(total_tokens, dtype=offsets.dtype, device=offsets.device)
        return torch.searchsorted(offsets[1:], row, right=True, out_int32=True)[None]

    return create_packed_seq_idx
