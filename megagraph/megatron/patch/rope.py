# SPDX-License-Identifier: Apache-2.0
"""What runs in place of Megatron's RoPE inside attention: canonical packs through our op, the rest untouched.

Megatron's own THD path reads the offsets on the host, which no graph can do, and refuses rows past the last
one. Layers that are neither captured nor run on a canonical pack never come here: they keep Megatron's own.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megagraph.megatron.graphs.positions import rows_are_positions
from megagraph.megatron.patch.tails import end_of_rows, without_gradient_tail, without_tail
from megagraph.modules import RotaryTables
from megagraph.packs.ops import RopeLayout

__all__ = ["wrap_rope"]

_INTERLEAVED = "mla_rotary_interleaved"


def _as_one_document(cu_seqlens: Tensor) -> Tensor:
    """Offsets of a pack whose positions go on from document to document, int32 [2]."""
    return cu_seqlens[:: cu_seqlens.numel() - 1].contiguous()


def wrap_rope(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `apply_rotary_pos_emb` as a module of attention sees it."""
    tables = RotaryTables()
    # Up to 0.16 the config says how MLA interleaves; later releases have an argument for it.
    by_config = _INTERLEAVED not in inspect.signature(original).parameters

    def layout_of(config: Any, is_latent: bool) -> RopeLayout:
        if config.multi_latent_attention if by_config else is_latent:
            return "mla_interleaved"
        return "interleaved" if config.rotary_interleaved else "neox"

    @functools.wraps(original)
    def apply_rotary_pos_emb(
        t: Tensor,
        freqs: Tensor,
        config: Any,
        cu_seqlens: Tensor | None = None,
        mscale: float = 1.0,
        cp_group: Any = None,
        **rest: Any,
    ) -> Any:
        are_rows = None if cu_seqlens is None else rows_are_positions(cu_seqlens)
        further = {name for name, value in rest.items() if value}
        if cu_seqlens is None or are_rows is None or not further <= {_INTERLEAVED}:
            return original(t, freqs, config, cu_seqlens, mscale, cp_group, **rest)
        cp_size, cp_rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
        if config.apply_rope_fusion:
            # The fused kernel leaves rows past the last offset as it finds them, there and back.
            end = end_of_rows(cu_seqlens, cp_size)
            rotated = original(without_gradient_tail(t, end), freqs, config, cu_seqlens, mscale, cp_group)
            return without_tail(rotated, end)
        return tables.rotate(
            t,
            freqs,
            _as_one_document(cu_seqlens) if are_rows else cu_seqlens,
            layout=layout_of(config, _INTERLEAVED in further),
            mscale=mscale,
            cp_size=cp_size,
            cp_rank=cp_rank,
        )

    return apply_rotary_pos_emb
