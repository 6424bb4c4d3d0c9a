# SPDX-License-Identifier: Apache-2.0
"""What runs in place of Megatron's RoPE inside attention: canonical packs through our op, the rest untouched.

Megatron's own THD path reads the offsets on the host, which no graph can do, and refuses rows past the last
one. Layers that are neither captured nor run on a canonical pack never come here: they keep Megatron's own.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megagraph.megatron.graphs.positions import rows_are_positions
from megagraph.modules import RotaryTables
from megagraph.packs.ops import RopeLayout

__all__ = ["wrap_rope"]

_INTERLEAVED = "mla_rotary_interleaved"


class _Untailed(torch.autograd.Function):
    """Passes a tensor on as it is; rows of its gradient past the last offset become zero."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cu_seqlens: Tensor) -> Tensor:
        ctx.save_for_backward(cu_seqlens)
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (cu_seqlens,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        torch.ops.megagraph.zero_tail_([grad], cu_seqlens)
        return grad, None


def _without_gradient_tail(t: Tensor, cu_seqlens: Tensor) -> Tensor:
    out: Tensor = _Untailed.apply(t, cu_seqlens)  # type: ignore[no-untyped-call]  # torch's
    return out


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
        if config.apply_rope_fusion:
            # The fused kernel leaves rows past the last offset as it finds them, there and back.
            rotated = original(
                _without_gradient_tail(t, cu_seqlens), freqs, config, cu_seqlens, mscale, cp_group
            )
            with torch.no_grad():
                torch.ops.megagraph.zero_tail_([rotated], cu_seqlens)
            return rotated
        return tables.rotate(
            t,
            freqs,
            _as_one_document(cu_seqlens) if are_rows else cu_seqlens,
            layout=layout_of(config, _INTERLEAVED in further),
            mscale=mscale,
            cp_size=1 if cp_group is None else cp_group.size(),
            cp_rank=0 if cp_group is None else cp_group.rank(),
        )

    return apply_rotary_pos_emb
