# SPDX-License-Identifier: Apache-2.0
"""What runs in place of Megatron's fused RoPE of multi-latent attention: canonical packs through our op.

Megatron's kernels are compiled at their first call, look for a row's document from the first one on, and read
the row before the table's first for rows past the last offset. Ours has their bits on all other rows. Packs
that are not canonical keep Megatron's own.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megagraph.megatron.graphs.positions import rows_are_positions
from megagraph.packs.latent_rope import rope_mla

__all__ = ["wrap_key_rope", "wrap_query_rope"]


def _is_ours(cu_seqlens: Tensor | None, further: dict[str, Any]) -> bool:
    """Whether these are the offsets of a canonical pack, and nothing else is asked for.

    Fused positions begin anew in each document, whatever the pack declares.
    """
    is_canonical = cu_seqlens is not None and rows_are_positions(cu_seqlens) is not None
    return is_canonical and not any(further.values())


def wrap_query_rope(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fused_apply_mla_rope_for_q` as multi-latent attention sees it."""

    @functools.wraps(original)
    def fused_apply_mla_rope_for_q(
        t: Tensor,
        cos: Tensor,
        sin: Tensor,
        qk_head_dim: int,
        emb_dim: int,
        cu_seqlens_q: Tensor | None = None,
        cp_rank: int = 0,
        cp_size: int = 1,
        **rest: Any,
    ) -> Any:
        if cu_seqlens_q is None or not _is_ours(cu_seqlens_q, rest):
            return original(t, cos, sin, qk_head_dim, emb_dim, cu_seqlens_q, cp_rank, cp_size, **rest)
        tables = cos.flatten(1), sin.flatten(1)
        (query,) = rope_mla(
            t, None, None, *tables, cu_seqlens_q, fused=True, cp_size=cp_size, cp_rank=cp_rank
        )
        return query

    return fused_apply_mla_rope_for_q


def wrap_key_rope(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fused_apply_mla_rope_for_kv` as multi-latent attention sees it."""

    @functools.wraps(original)
    def fused_apply_mla_rope_for_kv(
        kv: Tensor,
        k_pos_emb: Tensor,
        cos: Tensor,
        sin: Tensor,
        emb_dim: int,
        k_dim: int,
        v_dim: int,
        cu_seqlens_kv: Tensor | None = None,
        cp_rank: int = 0,
        cp_size: int = 1,
        **rest: Any,
    ) -> Any:
        if cu_seqlens_kv is None or not _is_ours(cu_seqlens_kv, rest):
            given = (kv, k_pos_emb, cos, sin, emb_dim, k_dim, v_dim, cu_seqlens_kv, cp_rank, cp_size)
            return original(*given, **rest)
        tables = cos.flatten(1), sin.flatten(1)
        return rope_mla(
            *(None, kv, k_pos_emb, *tables, cu_seqlens_kv),
            v_dim=v_dim,
            fused=True,
            cp_size=cp_size,
            cp_rank=cp_rank,
        )

    return fused_apply_mla_rope_for_kv
