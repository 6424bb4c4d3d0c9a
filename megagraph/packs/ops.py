# SPDX-License-Identifier: Apache-2.0
"""Ops over packed sequences: typed wrappers over those of ``torch.ops.megagraph`` that Python calls.

They do not build packs and know nothing of Megatron. All run on CPU and CUDA, and write every row of their
results. All but `rope_mla` trace under ``torch.compile(fullgraph=True)``.

Words: ``T`` physical tokens (rows of the buffer), ``N`` document slots, ``H`` heads, ``D`` head
dimension. Offsets (``cu_seqlens``) are contiguous int32 of shape [N + 1], start at 0 and do not decrease.
The *tail* is every row at or past the last offset. Padded offsets (``cu_seqlens_padded``) are global: on
``cp_size`` context-parallel ranks, of which this one is ``cp_rank``, every document's length is a multiple
of 2 * cp_size (of 1 if cp_size is 1), and ``total_tokens`` are those of all ranks together, a multiple of
cp_size.

What does not fit (shapes, dtypes, devices, sizes, ranks, offsets) is a ``ValueError`` that says what was
expected. On a GPU the host never reads offsets: wrong ones give undefined rows there.
"""

import enum
from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megagraph import _C as _C  # registers torch.ops.megagraph

__all__ = [
    *("RopeLayout", "RotaryTables", "TailConvention"),
    *("rope_mla", "rope_thd", "thd_partition_indices", "varlen_attention"),
]

RopeLayout = Literal["neox", "interleaved", "mla_interleaved"]


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

    def check(self, capacity: _C.Capacity, cp_size: int) -> None:
        """Raises `ValueError` if a capacity of packs that so many ranks share has no room for such a tail."""
        whole, longest = capacity.tokens * cp_size, capacity.max_seqlen
        if self is not TailConvention.HIDDEN and longest < whole:
            raise ValueError(
                f"tail: {self.value!r} makes a document as long as the tail, which needs a max_seqlen of "
                f"{whole}, got {longest}"
            )


def thd_partition_indices(cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    """List the physical rows that one context-parallel rank holds, int32 [total_tokens / cp_size].

    In zigzag order: each document is cut in 2 * cp_size chunks; rank r takes chunks r and
    2 * cp_size - 1 - r. The tail is dealt out in contiguous pieces, so over all ranks every physical row
    appears exactly once.

    Source: the layout of Transformer Engine's ``thd_get_partitioned_indices``.
    """
    out: Tensor = torch.ops.megagraph.thd_partition_indices(cu_seqlens_padded, total_tokens, cp_size, cp_rank)
    return out


def rope_thd(
    tensors: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    cu_seqlens_padded: Tensor,
    *,
    layout: RopeLayout = "neox",
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, ...]:
    """Rotate packed queries and keys by their position in their document, all in one launch.

    Does not compute the tables, and is differentiable once and not in them. Positions begin at 0 in each
    document; offsets [0, T] map the rows of a pack to those of a table that is as long. Equals Megatron's
    unfused path bit for bit with ``cos = (freqs.cos() * mscale).to(dtype)`` and ``sin`` likewise.

    Args:
        tensors: one to four of [T, H_i, D_i], one floating dtype; H_i and D_i may differ. Under context
            parallelism these are this rank's rows.
        cos: [positions, R] in the tensors' dtype, R even and at most every D_i. Dimensions from R on
            pass through.
        sin: like ``cos``.
        cu_seqlens_padded: of the whole pack.
        layout: where the members of a pair lie: ``neox`` at (i, R / 2 + i), ``interleaved`` at
            (2i, 2i + 1), ``mla_interleaved`` at (2i, 2i + 1) in the input and (i, R / 2 + i) in the output,
            as the decoupled part of multi-latent attention has it.
        cp_size: number of context-parallel ranks.
        cp_rank: this rank.

    Returns:
        One contiguous tensor per input, of its shape. The tail is zero, in the gradients as well.

    Raises:
        IndexError: on the CPU, if a document is longer than the tables; on a GPU this is a device
            assertion.

    Source: RoFormer (Su et al., 2021); ``megatron.core.models.common.embeddings.rope_utils``.
    """
    if layout not in get_args(RopeLayout):
        raise ValueError(f"layout: expected one of {', '.join(get_args(RopeLayout))}, got {layout!r}")
    out: list[Tensor] = torch.ops.megagraph.rope_thd(
        tensors,
        cos,
        sin,
        cu_seqlens_padded,
        interleaved=layout == "interleaved",
        mla_interleaved=layout == "mla_interleaved",
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    return tuple(out)


_Written = tuple[int, Tensor, Tensor]  # how often the frequencies had been, their cos and sin


class RotaryTables:
    """cos and sin tables of rotary frequencies, kept as long as the memory of the frequencies.

    Megatron's unfused path takes the cosine of the whole table in every layer, for queries and for
    keys; here it is taken once for each dtype and mscale, with the same roundings
    (csrc/ops/rope_rotation.h, Note [RoPE bits]). Views are known by their place: multi-latent
    attention makes one in each call, of as many rows as its pack has, and shorter ones have the first rows
    of the longest so far. Those before it stay, since graphs may read them, until frequencies that were
    written since have tables of their own.
    """

    def __init__(self) -> None:
        # By the memory of the frequencies, whose storage is one object as long as it lives.
        self._tables: WeakKeyDictionary[Any, dict[Hashable, list[_Written]]] = WeakKeyDictionary()

    def tables(self, freqs: Tensor, dtype: torch.dtype, mscale: float) -> tuple[Tensor, Tensor]:
        """Tables of [positions, rotary dimension] in `dtype`.

        They are of `freqs`, float32 [positions, 1, 1, rotary dimension], times YaRN's magnitude scale.
        """
        rows = freqs.size(0)
        key = freqs.storage_offset(), freqs.shape[1:], freqs.stride(), freqs.dtype, dtype, mscale
        known = self._tables.setdefault(freqs.untyped_storage(), {}).setdefault(key, [])
        writes = 0 if freqs.is_inference() else freqs._version
        if not known or known[-1][0] != writes or known[-1][1].size(0) < rows:
            with torch.inference_mode(False):  # training may need them next
                flat = freqs.detach().reshape(rows, -1)
                cos, sin = ((trig(flat) * mscale).to(dtype) for trig in (torch.cos, torch.sin))
            known[:] = [*(it for it in known if it[0] in (writes, known[-1][0])), (writes, cos, sin)]
        _writes, cos, sin = known[-1]
        return (cos, sin) if cos.size(0) == rows else (cos[:rows], sin[:rows])


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
    return _RopeMla.apply(q, kv, k_pe, v_dim, ranks, *by)  # type: ignore[no-any-return, no-untyped-call]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | tuple[Tensor, Tensor],
    max_seqlen: int | tuple[int, int],
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Attend inside each document of a pack. Differentiable once in q, k and v.

    Does not drop out, and exchanges nothing with context-parallel ranks. On a GPU it runs
    FlashAttention 2 through ATen, whose backward pass is deterministic only under
    ``torch.use_deterministic_algorithms(True)``; the CPU side is a slow reference.

    Args:
        q: [T, H, D]; on a GPU float16 or bfloat16, D a multiple of 8 and at most 256.
        k: [S, G, D] with H a multiple of G (grouped-query attention); S is T if keys have the same offsets.
        v: like k.
        cu_seqlens: physical offsets. Causal attention never lets a valid row see the
            padding after it. Where keys have others: those of the queries, and those of the keys; a query
            attends to keys of its document's number.
        max_seqlen: no document is longer; likewise. It sizes the launch, so a constant serves many packs.
            On a GPU the rows of a longer document are undefined.
        softmax_scale: factor on the scores; by default 1 / sqrt(D).
        causal: a row sees itself and the rows before it, else its whole document. The last query of a
            document sees all of its keys, the one before it a key less.

    Returns:
        [T, H, D] in q's dtype. The tail is zero, in the three gradients as well.

    Source: FlashAttention-2 (Dao, 2023).
    """
    offsets = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    longest = max_seqlen if isinstance(max_seqlen, tuple) else (max_seqlen, max_seqlen)
    out: Tensor = torch.ops.megagraph.varlen_attention(
        q, k, v, *offsets, *longest, softmax_scale=softmax_scale, causal=causal
    )[0]
    return out
