# SPDX-License-Identifier: Apache-2.0
"""A THD core attention for Megatron's local layer spec, which has none without Transformer Engine.

Does not drop out, window, or split over context-parallel ranks: refuses what it does not do.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megagraph.packs import ops
from megagraph.packs.packing import PackedSequences

__all__ = ["VarlenAttention"]


def _first(out: Tensor, dim: int) -> Tensor:
    """The first entries of the last dimension; all of them are no view, whose gradient would be a copy."""
    return out if out.size(-1) == dim else out[..., :dim]


class VarlenAttention(nn.Module):
    """Attention inside each document of a pack, in place of the spec's `core_attention`.

    The constructor and `forward()` take what Megatron's `DotProductAttention` takes. Under a causal
    mask documents are bounded by their physical rows, so padding at a document's end is harmless;
    without one, a pack with padding is refused. Values of fewer dimensions than the keys, as those of
    multi-latent attention, are padded with zeros.

    Args:
        config: Megatron's `TransformerConfig`.
        layer_number: unused, as there is no per-layer scaling here.
        attn_mask_type: Megatron's `AttnMaskType`; causal ones and `no_mask`.
        attention_type: `self`.
        attention_dropout: expected to be 0; by default the config's.
        softmax_scale: by default 1 / sqrt(head dimension).

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
        **unused: Any,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout != 0:
            raise ValueError(f"VarlenAttention: expected attention_dropout 0, got {dropout}")
        if attention_type != "self":
            raise ValueError(f"VarlenAttention: expected self attention, got {attention_type!r}")
        if config.context_parallel_size != 1:
            raise ValueError(
                f"VarlenAttention: expected context_parallel_size 1, got {config.context_parallel_size}"
            )
        for option, expected in (("window_size", None), ("softmax_type", "vanilla")):
            if getattr(config, option, expected) != expected:
                raise ValueError(
                    f"VarlenAttention: expected {option} {expected}, got {getattr(config, option)}"
                )
        if config.apply_query_key_layer_scaling:
            raise ValueError("VarlenAttention: expected apply_query_key_layer_scaling False, got True")
        self.softmax_scale = softmax_scale
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
        kept = value.size(-1)
        value = F.pad(value, (0, key.size(-1) - kept)) if kept < key.size(-1) else value
        if packed_seq_params is None:
            mask = self._mask_name if attn_mask_type is None else attn_mask_type.name
            if attention_mask is not None and mask.startswith("padding"):
                raise ValueError(f"VarlenAttention: a {mask} mask is taken as a pack only, got a tensor")
            return _first(self._unpacked(query, key, value, causal), kept).flatten(2)
        cp_size = getattr(packed_seq_params, "local_cp_size", None)
        if cp_size not in (None, 1):
            raise ValueError(f"VarlenAttention: expected local_cp_size 1, got {cp_size}")
        padded = packed_seq_params.cu_seqlens_q_padded
        if padded is not None and not causal:
            raise ValueError("VarlenAttention: padding inside a pack needs a causal mask, got none")
        offsets = packed_seq_params.cu_seqlens_q if padded is None else padded
        out = ops.varlen_attention(
            query,
            key,
            value,
            offsets,
            int(packed_seq_params.max_seqlen_q),
            softmax_scale=self.softmax_scale,
            causal=causal,
        )
        return _first(out, kept).flatten(1)

    def _unpacked(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        length, batch, heads, dim = query.shape
        q, k, v = (t.transpose(0, 1).reshape(batch * length, -1, dim) for t in (query, key, value))
        offsets = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        out = ops.varlen_attention(q, k, v, offsets, length, softmax_scale=self.softmax_scale, causal=causal)
        return out.view(batch, length, heads, dim).transpose(0, 1).contiguous()
