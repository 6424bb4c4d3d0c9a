# SPDX-License-Identifier: Apache-2.0
"""What Megatron's local layer spec lacks for packs without Transformer Engine: attention, and a norm.

They refuse what they do not do: attention does not drop out or window.

Context-parallel ranks that share a pack hold their rows in zigzag order
(`megagraph.packs.ops.thd_partition_indices`), and each attends for its own queries. Offsets are global and
physical then, every document's length a multiple of twice the number of ranks, and no document longer than
`max_seqlen`, all ranks together. Nothing here reads the offsets on the host, so that it can be captured;
collectives are torch's, of the group that is given.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from megagraph.modules.experts import linear_map
from megagraph.packs import ops

__all__ = ["Norm", "VarlenAttention"]

_Group = distributed.ProcessGroup


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | tuple[Tensor, Tensor],
    max_seqlen: int | tuple[int, int],
    **how: Any,
) -> Tensor:
    """Attention inside each document; `how` are the op's options.

    Values of fewer dimensions than the keys are padded with zeros.
    """
    dim, kept = key.size(-1), value.size(-1)
    padded = F.pad(value, (0, dim - kept)) if kept < dim else value
    out = ops.varlen_attention(query, key, padded, cu_seqlens, max_seqlen, **how)
    return out if kept == dim else out[..., :kept]  # all of them are no view: its gradient would be a copy


def _exchanged(parts: Tensor, group: _Group) -> Tensor:
    received = torch.empty_like(parts)
    distributed.all_to_all_single(received, parts, group=group)
    return received


def _gathered(local: Tensor, keys: Tensor, _places: Tensor, group: _Group) -> Tensor:
    """The keys that this rank's queries see, of local rows of all ranks."""
    gathered = local.new_empty(group.size() * local.size(0), *local.shape[1:])
    distributed.all_gather_into_tensor(gathered, local.contiguous(), group=group)
    return gathered.index_select(0, keys)


def _added_up(grad: Tensor, _keys: Tensor, places: Tensor, group: _Group) -> Tensor:
    """The gradient of local rows: all ranks' parts, in the order of the ranks."""
    exact = torch.promote_types(grad.dtype, torch.float32)
    # One row more, of zeros: for rows that a chunk does not see.
    seen = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
    of_first, of_second = (seen.index_select(0, of_chunk) for of_chunk in places)
    mine = (of_first.to(exact) + of_second).to(grad.dtype).unflatten(0, (group.size(), -1))
    return _exchanged(mine, group).sum(0, dtype=exact).to(grad.dtype)


def _attend_gathered(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, group: _Group, **how: Any
) -> Tensor:
    """Causal attention for this rank's rows, over keys and values gathered from all ranks.

    Keys and values travel once forward, and their gradients once backward, in their own dtype; the ranks'
    parts of a gradient are summed in the order of the ranks in float32, and rounded once. Every rank does the
    same work, whatever the documents' lengths. Queries are [T / c, H, D], this rank's rows of T on c ranks; T
    is a multiple of 2 * c.
    """
    if not how["causal"]:
        raise ValueError("VarlenAttention: all_gather needs a causal mask, got none; a2a takes any")
    size, rank = group.size(), group.rank()
    chunk = -(-max_seqlen // (2 * size))  # of the longest document
    total = size * query.size(0)
    offsets_q, offsets_k, *maps = torch.ops.megagraph.thd_context_keys(cu_seqlens, total, size, rank)
    there, back = partial(_gathered, group=group), partial(_added_up, group=group)
    seen = linear_map(torch.cat([key, value], -1), there, back, *maps)
    seen_key, seen_value = seen.split([key.size(-1), value.size(-1)], -1)
    offsets, longest = (offsets_q, offsets_k), (chunk, chunk * (2 * size - rank))
    return _attend(query, seen_key, seen_value, offsets, longest, **how)


def _to_heads(rows: Tensor, maps: Tensor, group: _Group) -> Tensor:
    """Local rows of all heads [T / c, H, D] to all rows of local heads [T, H / c, D], by documents."""
    count, heads, dim = rows.shape
    parts = rows.view(count, group.size(), heads // group.size(), dim).transpose(0, 1).contiguous()
    return _exchanged(parts, group).flatten(0, 1).index_select(0, maps[0])


def _to_rows(rows: Tensor, maps: Tensor, group: _Group) -> Tensor:
    """Back again."""
    parts = rows.index_select(0, maps[1]).view(group.size(), -1, *rows.shape[1:])
    return _exchanged(parts, group).transpose(0, 1).flatten(1, 2).contiguous()


def _attend_over_heads(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, group: _Group, **how: Any
) -> Tensor:
    """Attention over the whole pack for this rank's share of the heads.

    Queries, keys, values and the output travel once each way.
    """
    size = group.size()
    for heads, name in ((query.size(1), "query heads"), (key.size(1), "query groups")):
        if heads % size:
            raise ValueError(
                f"attend_over_heads: expected a multiple of {size} {name}, got {heads}; "
                "all_gather takes any number"
            )
    maps = torch.ops.megagraph.thd_gathered_rows(cu_seqlens, size * query.size(0), size)
    there, back = partial(_to_heads, group=group), partial(_to_rows, group=group)
    query, key, value = (linear_map(rows, there, back, maps) for rows in (query, key, value))
    return linear_map(_attend(query, key, value, cu_seqlens, max_seqlen, **how), back, there, maps)


# What Megatron calls the ways to share a pack; a ring (`p2p`) is its default, and here not one of them.
_WAYS = {**dict.fromkeys((None, "p2p", "all_gather"), _attend_gathered), "a2a": _attend_over_heads}


def _way(cp_comm_type: str | None) -> Callable[..., Tensor]:
    if cp_comm_type not in _WAYS:
        known = ", ".join(filter(None, _WAYS))
        raise ValueError(f"VarlenAttention: expected cp_comm_type of {known}, got {cp_comm_type}")
    return _WAYS[cp_comm_type]


def _is_causal(attn_mask_type: Any) -> bool:
    name: str = attn_mask_type.name
    if name not in ("causal", "padding_causal", "no_mask", "padding"):
        raise ValueError(f"VarlenAttention: expected a causal mask or none, got {name}")
    return name.endswith("causal")


class VarlenAttention(nn.Module):
    """Attention inside each document of a pack, in place of the spec's `core_attention`.

    The constructor and `forward()` take what Megatron's `DotProductAttention` takes. Under a causal
    mask documents are bounded by their physical rows, so padding at a document's end is harmless;
    without one, a pack with padding is refused. Values of fewer dimensions than the keys, as those of
    multi-latent attention, are padded with zeros. Context-parallel ranks share a pack as it says
    (`local_cp_size`, `cp_group`), else as the config does; its `max_seqlen` is of all ranks together.

    Of what Megatron hands over, `cp_comm_type` says how ranks share a pack: `all_gather`, which `p2p` and
    None stand for, too, or `a2a`; and `pg_collection` has their group, `cp`. Megatron hands over the former
    only where all packs are shared; else it is the config's, of this layer (`layer_number`, from 1).

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
        cp_comm_type = further.get("cp_comm_type")
        if cp_comm_type is None and config.context_parallel_size == 1:
            found = getattr(config, "cp_comm_type", None)
            cp_comm_type = found[layer_number - 1] if isinstance(found, (list, tuple)) else found
        else:
            _way(cp_comm_type)
        lacking = {"window_size": None, "softmax_type": "vanilla", "apply_query_key_layer_scaling": False}
        for option, expected in lacking.items():
            if (found := getattr(config, option, expected)) != expected:
                raise ValueError(f"VarlenAttention: expected {option} {expected}, got {found}")
        self.softmax_scale, self.cp_comm_type = softmax_scale, cp_comm_type
        is_shared, groups = config.context_parallel_size > 1, further.get("pg_collection")
        self.cp_group: _Group | None = getattr(groups, "cp", None) if is_shared else None
        if is_shared and self.cp_group is None:
            raise ValueError(
                f"VarlenAttention: expected a pg_collection with the context-parallel group of "
                f"context_parallel_size {config.context_parallel_size}, got none"
            )
        _is_causal(attn_mask_type)
        self.attn_mask_type = attn_mask_type

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attends: [T, H, D] to [T, H * V] in a pack, else [S, B, H, D] to [S, B, H * V].

        Keys have as many heads as there are query groups, and values V dimensions, at most D. The mask is not
        read in a pack; unpacked, it is expected to be the causal one or None.
        """
        if attention_bias is not None:
            raise ValueError("VarlenAttention: expected no attention_bias, got one")
        mask = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        causal = _is_causal(mask)
        if packed_seq_params is None:
            if attention_mask is not None and mask.name.startswith("padding"):
                raise ValueError(f"VarlenAttention: a {mask.name} mask is taken as a pack only, got a tensor")
            if self.cp_group is not None:
                raise ValueError("VarlenAttention: context-parallel ranks share packs only, got none")
            return self._unpacked(query, key, value, causal).flatten(2)
        offsets = packed_seq_params.cu_seqlens_q_padded  # bound physical rows; without any the others do
        if offsets is None:
            offsets = packed_seq_params.cu_seqlens_q
        elif not causal:
            raise ValueError("VarlenAttention: padding inside a pack needs a causal mask, got none")
        longest, group = int(packed_seq_params.max_seqlen_q), self._group_of(packed_seq_params)
        how: dict[str, Any] = {"softmax_scale": self.softmax_scale, "causal": causal}
        if group is None:
            return _attend(query, key, value, offsets, longest, **how).flatten(1)
        attend = _way(self.cp_comm_type)  # of the config alone others' may be unknown here
        return attend(query, key, value, offsets, longest, group, **how).flatten(1)

    def _group_of(self, params: Any) -> _Group | None:
        """The ranks that share a pack, or None for this one alone."""
        size = getattr(params, "local_cp_size", None)
        group: _Group | None = getattr(params, "cp_group", None)
        if size is None:
            return self.cp_group if self.cp_group is not None and self.cp_group.size() > 1 else None
        if size != 1 and (group is None or group.size() != size):
            found = "none" if group is None else f"one of {group.size()} ranks"
            raise ValueError(f"VarlenAttention: expected a cp_group of local_cp_size {size}, got {found}")
        return group if size != 1 else None

    def _unpacked(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        length, batch = query.shape[:2]
        q, k, v = (it.transpose(0, 1).flatten(0, 1) for it in (query, key, value))
        offsets = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        out = _attend(q, k, v, offsets, length, softmax_scale=self.softmax_scale, causal=causal)
        return out.view(batch, length, *out.shape[1:]).transpose(0, 1).contiguous()


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, as the config says, with torch's own bits.

    The constructor takes what Megatron's specs give a norm; parameters have the names, shapes and dtype
    of `torch.nn.LayerNorm` and `torch.nn.RMSNorm`. Under sequence parallelism each rank normalizes its
    own rows, so the parameters are marked `sequence_parallel`, and Megatron sums their gradients over
    the tensor-parallel ranks. `persist_layer_norm` names a kernel of Apex and is not read.

    Raises:
        ValueError: naming the option of the config that this norm does not have.
    """

    bias: nn.Parameter | None

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.normalization: str = config.normalization
        if (found := self.normalization) not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"Norm: expected normalization 'LayerNorm' or 'RMSNorm', got {found!r}")
        if config.memory_efficient_layer_norm:
            raise ValueError("Norm: expected memory_efficient_layer_norm False, got True")
        self.is_zero_centered: bool = config.layernorm_zero_centered_gamma
        self.normalized_shape, self.eps = (hidden_size,), eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if self.normalization == "LayerNorm" else None
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Makes the scale one and the shift zero."""
        nn.init.constant_(self.weight, 0.0 if self.is_zero_centered else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalizes [..., hidden_size]; shape and dtype stay."""
        weight = self.weight + 1 if self.is_zero_centered else self.weight
        if self.bias is None:
            return F.rms_norm(hidden_states, self.normalized_shape, weight, self.eps)
        return F.layer_norm(hidden_states, self.normalized_shape, weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        centered = ", zero-centered" if self.is_zero_centered else ""
        return f"{self.normalization}, {self.normalized_shape[0]}, eps={self.eps}{centered}"
