# SPDX-License-Identifier: Apache-2.0
"""RoPE over packed sequences that can be captured: Megatron's frequencies as tables, and the fused kind.

That is the one of multi-latent attention, queries in place, keys and values in one launch. Does not compute
frequencies, and does not trace under ``torch.compile``. `megagraph/packs/ops.py` says what the words mean.
"""

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megagraph.packs import ops

__all__ = ["RotaryTables", "rope_mla"]


class _RopeMla(torch.autograd.Function):
    """Rotates in place without telling autograd that it did.

    Queries are a view of a projection's output, and to rebase a view's history copies its whole gradient
    twice. Whoever saved the queries before learns from their version that they were written.
    """

    @staticmethod
    def forward(ctx: Any, q: Any, kv: Any, k_pe: Any, v_dim: int, ranks: Any, *by: Tensor) -> Any:
        made = torch.ops.megagraph.rope_mla_(q, kv, k_pe, *by, v_dim=v_dim, **ranks)
        ctx.save_for_backward(*by)
        ctx.ranks, ctx.has_q, ctx.has_kv = ranks, q is not None, kv is not None
        return tuple(made) if q is None else (q.view_as(q), *made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq = grads[0] if ctx.has_q else None
        dk, dv = grads[-2:] if ctx.has_kv else (None, None)
        made = torch.ops.megagraph.rope_mla_backward(dq, dk, dv, *ctx.saved_tensors, **ctx.ranks)
        of_q = made[:1] if ctx.has_q else [None]
        of_kv = made[-2:] if ctx.has_kv else [None, None]
        return (*of_q, *of_kv, *(None,) * 5)


def rope_mla(
    q: Tensor | None,
    kv: Tensor | None,
    k_pe: Tensor | None,
    by: tuple[Tensor, Tensor, Tensor],
    *,
    v_dim: int = 0,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, ...]:
    """Rotate the last dimensions of MLA's queries in place, and make keys and values, in one launch.

    The tensor `q` must not be used afterwards: it holds what the result does, without its history. Is
    differentiable once, and not in the tables. Positions begin at 0 in each document. Members of a pair lie
    side by side in the inputs and half of R apart in the results, as in `rope_thd`'s ``mla_interleaved``.

    Rotates `by` cos and sin, [positions, R] in the tensors' dtype, R even and at most 256, YaRN's scale
    multiplied in, and padded offsets.

    Of q, [T, H, C + R] and dense, the last R dimensions of each head are rotated; its memory is the first
    result. Of kv, [T, G, C + V], each head has the key's C dimensions without a position, then its value of V
    (`v_dim`), and k_pe, [T, 1, R], is the rotary part of the key that all heads share: keys [T, G, C + R] and
    values [T, G, V] are the next results, contiguous. Either may be None, k_pe with kv.

    Whole rows of the tail are zero, in the gradients as well. The gradient of k_pe is summed over the heads
    in float32 (of float64 in float64), in their order, and rounded once before it is rotated back.

    Source: DeepSeek-V2 (2024); the roundings are those of ``megatron.core.fusions.fused_mla_yarn_rope_apply``
    as Triton compiles it: the product of a pair's second member is rounded, that of the first is added
    unrounded.
    """
    ranks = {"cp_size": cp_size, "cp_rank": cp_rank}
    out: tuple[Tensor, ...] = _RopeMla.apply(q, kv, k_pe, v_dim, ranks, *by)  # type: ignore[no-untyped-call]  # torch's
    return out


_Pair = tuple[Tensor, Tensor]


class RotaryTables:
    """cos and sin tables of rotary frequencies, kept as long as the memory of the frequencies.

    Megatron's unfused path takes the cosine of the whole table in every layer, for queries and for
    keys; here it is taken once for each dtype and mscale, with the same roundings
    (csrc/ops/rope_rotation.h, Note [RoPE bits]). Views are known by their place: multi-latent
    attention makes one in each call, of as many rows as its pack has, and shorter ones have the first rows
    of the longest so far. Those before it stay, since graphs may read them.
    """

    def __init__(self) -> None:
        # By the memory of the frequencies, whose storage is one object as long as it lives.
        self._tables: weakref.WeakKeyDictionary[Any, dict[Hashable, list[_Pair]]]
        self._tables = weakref.WeakKeyDictionary()

    def tables(self, freqs: Tensor, dtype: torch.dtype, mscale: float) -> tuple[Tensor, Tensor]:
        """Tables of [positions, rotary dimension] in `dtype`.

        They are of `freqs`, float32 [positions, 1, 1, rotary dimension], times YaRN's magnitude scale.
        """
        rows = freqs.size(0)
        key = freqs.storage_offset(), freqs.shape[1:], freqs.stride(), freqs.dtype, dtype, mscale
        pairs = self._tables.setdefault(freqs.untyped_storage(), {}).setdefault(key, [])
        if not pairs or pairs[-1][0].size(0) < rows:
            flat = freqs.detach().reshape(rows, -1)
            cos, sin = ((trig(flat) * mscale).to(dtype) for trig in (torch.cos, torch.sin))
            pairs.append((cos, sin))
        cos, sin = pairs[-1]
        return (cos, sin) if cos.size(0) == rows else (cos[:rows], sin[:rows])

    def rotate(
        self,
        t: Tensor,
        freqs: Tensor,
        cu_seqlens_padded: Tensor,
        *,
        mscale: float = 1.0,
        **further: Any,  # of `rope_thd`
    ) -> Tensor:
        """Rotates queries or keys [T, H, D] by their position in their document; tail rows are zero."""
        cos, sin = self.tables(freqs, t.dtype, mscale)
        (out,) = ops.rope_thd([t], cos, sin, cu_seqlens_padded, **further)
        return out
