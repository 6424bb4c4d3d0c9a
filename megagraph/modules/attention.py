# SPDX-License-Identifier: Apache-2.0
"""A THD core attention for Megatron's local layer spec, which has none without Transformer Engine.

Does not drop out or window: refuses what it does not do.

Context-parallel ranks that share a pack hold their rows in zigzag order
(`megagraph.packs.ops.thd_partition_indices`), and each attends for its own queries. Nothing here reads the
offsets on the host, so that it can be captured; collectives are torch's, of the group that is given.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable

from megagraph.packs import ops
from megagraph.packs.packing import PackedSequences

__all__ = ["VarlenAttention"]


class _SharedPack(NamedTuple):
    """A pack, and the ranks that share it.

    Its offsets are global and physical, every document's length a multiple of twice the number of ranks, and
    no document longer than `max_seqlen`, all ranks together.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    group: distributed.ProcessGroup  # two ranks or more


def _padded(value: Tensor, dim: int) -> Tensor:
    """Values with zeros up to as many dimensions as keys have."""
    return F.pad(value, (0, dim - value.size(-1))) if value.size(-1) < dim else value


def _first(out: Tensor, dim: int) -> Tensor:
    """The first entries of the last dimension; all of them are no view, whose gradient would be a copy."""
    return out if out.size(-1) == dim else out[..., :dim]


class _GatherKeys(torch.autograd.Function):
    """The keys that this rank's queries see, of local rows of all ranks; gradients add up in their order."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, keys: Tensor, places: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(places)
        ctx.group = group
        gathered = local.new_empty(group.size() * local.size(0), *local.shape[1:])
        distributed.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered.index_select(0, keys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        exact = torch.promote_types(grad.dtype, torch.float32)
        # One row more, of zeros: for rows that a chunk does not see.
        seen = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
        of_first, of_second = (seen.index_select(0, of_chunk) for of_chunk in places)
        mine = (of_first.to(exact) + of_second).to(grad.dtype).unflatten(0, (ctx.group.size(), -1))
        return _exchanged(mine, ctx.group).sum(0, dtype=exact).to(grad.dtype), None, None, None


def _attend_gathered(
    query: Tensor, key: Tensor, value: Tensor, pack: _SharedPack, *, softmax_scale: float | None = None
) -> Tensor:
    """Causal attention for this rank's rows, over keys and values gathered from all ranks.

    Keys and values travel once forward, and their gradients once backward, in their own dtype; the ranks'
    parts of a gradient are summed in the order of the ranks in float32, and rounded once. Every rank does the
    same work, whatever the documents' lengths. Queries are [T / c, H, D], this rank's rows of T on c ranks; T
    is a multiple of 2 * c.
    """
    size, rank, dim, kept = pack.group.size(), pack.group.rank(), key.size(-1), value.size(-1)
    total = size * query.size(0)
    chunk = -(-pack.max_seqlen // (2 * size))  # of the longest document
    offsets_q, offsets_k, keys, places = ops.thd_context_keys(pack.cu_seqlens, total, size, rank)
    seen = _GatherKeys.apply(torch.cat([key, value], -1), keys, places, pack.group)  # type: ignore[no-untyped-call]
    seen_key, seen_value = seen.split([dim, kept], -1)
    out = ops.varlen_attention_to_keys(
        query,
        seen_key,
        _padded(seen_value, dim),
        (offsets_q, chunk),
        (offsets_k, chunk * (2 * size - rank)),
        softmax_scale=softmax_scale,
    )
    return _first(out, kept)


class _ExchangeHeads(torch.autograd.Function):
    """Local rows of all heads to all rows of local heads, in the order of documents; or back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, maps: Tensor, group: Any, to_heads: bool) -> Tensor:
        ctx.save_for_backward(maps)
        ctx.group, ctx.to_heads = group, to_heads
        return _to_heads(rows, maps, group) if to_heads else _to_rows(rows, maps, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (maps,) = ctx.saved_tensors
        back = _to_rows if ctx.to_heads else _to_heads
        return back(grad, maps, ctx.group), None, None, None


def _exchanged(parts: Tensor, group: distributed.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts)
    distributed.all_to_all_single(received, parts, group=group)
    return received


def _to_heads(rows: Tensor, maps: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """[T / c, H, D] to [T, H / c, D]."""
    count, heads, dim = rows.shape
    parts = rows.view(count, group.size(), heads // group.size(), dim).transpose(0, 1).contiguous()
    return _exchanged(parts, group).flatten(0, 1).index_select(0, maps[0])


def _to_rows(rows: Tensor, maps: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """[T, H / c, D] to [T / c, H, D]."""
    parts = rows.index_select(0, maps[1]).view(group.size(), -1, *rows.shape[1:])
    return _exchanged(parts, group).transpose(0, 1).flatten(1, 2).contiguous()


def _attend_over_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: _SharedPack,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention over the whole pack for this rank's share of the heads.

    Queries, keys, values and the output travel once each way.
    """
    size = pack.group.size()
    for heads, name in ((query.size(1), "query heads"), (key.size(1), "query groups")):
        if heads % size:
            raise ValueError(
                f"attend_over_heads: expected a multiple of {size} {name}, got {heads}; "
                "all_gather takes any number"
            )
    maps = ops.thd_gathered_rows(pack.cu_seqlens, size * query.size(0), size)
    query, key, value = (
        _ExchangeHeads.apply(rows, maps, pack.group, True)  # type: ignore[no-untyped-call]
        for rows in (query, key, value)
    )
    out = ops.varlen_attention(
        query,
        key,
        _padded(value, key.size(-1)),
        pack.cu_seqlens,
        pack.max_seqlen,
        softmax_scale=softmax_scale,
        causal=causal,
    )
    out = _first(out, value.size(-1))
    made: Tensor = _ExchangeHeads.apply(out, maps, pack.group, False)  # type: ignore[no-untyped-call]
    return made


# What Megatron calls the ways to share a pack; a ring (`p2p`) is its default, and here not one of them.
_WAYS = {
    None: _attend_gathered,
    "p2p": _attend_gathered,
    "all_gather": _attend_gathered,
    "a2a": _attend_over_heads,
}


def _of_layer(option: str | Sequence[str] | None, layer_number: int) -> str | None:
    """What a config says of one layer, by a word for all or by one for each."""
    return option if option is None or isinstance(option, str) else option[layer_number - 1]


def _unknown(cp_comm_type: str | None) -> ValueError:
    known = ", ".join(filter(None, _WAYS))
    return ValueError(f"VarlenAttention: expected cp_comm_type of {known}, got {cp_comm_type}")


class VarlenAttention(nn.Module):
    """Attention inside each document of a pack, in place of the spec's `core_attention`.

    The constructor and `forward()` take what Megatron's `DotProductAttention` takes. Under a causal
    mask documents are bounded by their physical rows, so padding at a document's end is harmless;
    without one, a pack with padding is refused. Values of fewer dimensions than the keys, as those of
    multi-latent attention, are padded with zeros. Context-parallel ranks share a pack as it says
    (`local_cp_size`, `cp_group`), else as the config does; its `max_seqlen` is of all ranks together.

    Args:
        config: Megatron's `TransformerConfig`.
        layer_number: from 1; says which entry of a config's list is this layer's.
        attn_mask_type: Megatron's `AttnMaskType`; causal ones and `no_mask`.
        attention_type: `self`.
        attention_dropout: expected to be 0; by default the config's.
        softmax_scale: by default 1 / sqrt(head dimension).
        further: of what Megatron hands over, `cp_comm_type` says how ranks share a pack: `all_gather`, which
            `p2p` and None stand for, too, or `a2a`; and `pg_collection` has their group, `cp`. Megatron hands
            over the former only where all packs are shared; else it is the config's, of this layer.

    Raises:
        ValueError: naming the option of the config that this attention does not have.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **further: Any,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout != 0:
            raise ValueError(f"VarlenAttention: expected attention_dropout 0, got {dropout}")
        if attention_type != "self":
            raise ValueError(f"VarlenAttention: expected self attention, got {attention_type!r}")
        cp_comm_type: str | None = further.get("cp_comm_type")
        if cp_comm_type is None and config.context_parallel_size == 1:
            cp_comm_type = _of_layer(getattr(config, "cp_comm_type", None), layer_number)
        elif cp_comm_type not in _WAYS:
            raise _unknown(cp_comm_type)
        for option, expected in (("window_size", None), ("softmax_type", "vanilla")):
            if getattr(config, option, expected) != expected:
                raise ValueError(
                    f"VarlenAttention: expected {option} {expected}, got {getattr(config, option)}"
                )
        if config.apply_query_key_layer_scaling:
            raise ValueError("VarlenAttention: expected apply_query_key_layer_scaling False, got True")
        self.softmax_scale = softmax_scale
        self.cp_comm_type = cp_comm_type
        self.cp_group: distributed.ProcessGroup | None = None
        if config.context_parallel_size > 1:
            self.cp_group = getattr(further.get("pg_collection"), "cp", None)
            if self.cp_group is None:
                raise ValueError(
                    f"VarlenAttention: expected a pg_collection with the context-parallel group of "
                    f"context_parallel_size {config.context_parallel_size}, got none"
                )
        self._mask_name: str = attn_mask_type.name
        self.is_causal = self._causal(attn_mask_type)

    @staticmethod
    def _causal(attn_mask_type: Any) -> bool:
        if attn_mask_type.name in ("causal", "padding_causal"):
            return True
        if attn_mask_type.name in ("no_mask", "padding"):
            return False
        raise ValueError(f"VarlenAttention: expected a causal mask or none, got {attn_mask_type.name}")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Attends.

        Args:
            query: [T, H, D] in a pack, else [S, B, H, D].
            key: as the query, with as many heads as there are query groups.
            value: as the key; its last dimension V may be smaller.
            attention_mask: not read in a pack; unpacked, expected to be the causal one or None.
            attn_mask_type: in place of the constructor's.
            attention_bias: expected to be None.
            packed_seq_params: the pack, or None.

        Returns:
            [T, H * V] in a pack, else [S, B, H * V].
        """
        if attention_bias is not None:
            raise ValueError("VarlenAttention: expected no attention_bias, got one")
        causal = self.is_causal if attn_mask_type is None else self._causal(attn_mask_type)
        if packed_seq_params is None:
            mask = self._mask_name if attn_mask_type is None else attn_mask_type.name
            if attention_mask is not None and mask.startswith("padding"):
                raise ValueError(f"VarlenAttention: a {mask} mask is taken as a pack only, got a tensor")
            if self.cp_group is not None:
                raise ValueError("VarlenAttention: context-parallel ranks share packs only, got none")
            return self._unpacked(query, key, value, causal).flatten(2)
        padded_offsets = packed_seq_params.cu_seqlens_q_padded
        if padded_offsets is not None and not causal:
            raise ValueError("VarlenAttention: padding inside a pack needs a causal mask, got none")
        offsets = packed_seq_params.cu_seqlens_q if padded_offsets is None else padded_offsets
        longest, group = int(packed_seq_params.max_seqlen_q), self._group_of(packed_seq_params)
        if group is not None:
            pack = _SharedPack(cu_seqlens=offsets, max_seqlen=longest, group=group)
            return self._shared(query, key, value, pack, causal).flatten(1)
        out = ops.varlen_attention(
            query,
            key,
            _padded(value, key.size(-1)),
            offsets,
            longest,
            softmax_scale=self.softmax_scale,
            causal=causal,
        )
        return _first(out, value.size(-1)).flatten(1)

    def _group_of(self, params: PackedSequences) -> distributed.ProcessGroup | None:
        """The ranks that share a pack, or None for this one alone."""
        size = getattr(params, "local_cp_size", None)
        group: distributed.ProcessGroup | None = getattr(params, "cp_group", None)
        if size is None:
            return self.cp_group if self.cp_group is not None and self.cp_group.size() > 1 else None
        if size > 1 and (group is None or group.size() != size):
            found = "none" if group is None else f"one of {group.size()} ranks"
            raise ValueError(f"VarlenAttention: expected a cp_group of local_cp_size {size}, got {found}")
        return group if size > 1 else None

    def _shared(self, query: Tensor, key: Tensor, value: Tensor, pack: _SharedPack, causal: bool) -> Tensor:
        if self.cp_comm_type not in _WAYS:  # of the config alone, whose other users may know it
            raise _unknown(self.cp_comm_type)
        if _WAYS[self.cp_comm_type] is _attend_over_heads:
            return _attend_over_heads(
                query, key, value, pack, softmax_scale=self.softmax_scale, causal=causal
            )
        if not causal:
            raise ValueError("VarlenAttention: all_gather needs a causal mask, got none; a2a takes any")
        return _attend_gathered(query, key, value, pack, softmax_scale=self.softmax_scale)

    def _unpacked(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        length, batch, heads, dim = query.shape
        kept, values = value.size(-1), _padded(value, dim)
        q, k, v = (t.transpose(0, 1).reshape(batch * length, -1, dim) for t in (query, key, values))
        offsets = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        out = ops.varlen_attention(q, k, v, offsets, length, softmax_scale=self.softmax_scale, causal=causal)
        return _first(out.view(batch, length, heads, dim).transpose(0, 1).contiguous(), kept)
