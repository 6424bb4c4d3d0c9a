# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of one document that is described as no pack.

So Megatron's hybrid context parallelism gives them in 0.16: in the format of unpacked batches, with the
document's length and the ranks that share it. They share its rows as those of a pack's documents, so that it
is a pack of one, which layers that know packs alone can run, and graphs.
"""

from typing import Any

import torch
from torch import Tensor

from megagraph.megatron.graphs.pack_fields import copy_foreign_attributes, new_params

__all__ = ["as_pack"]

# What the pack says as the document does.
_KEPT = ("max_seqlen_q", "max_seqlen_kv", "local_cp_size", "cp_group")


def as_pack(params: Any, ids: Any, hidden_states: Any) -> Any:
    """A document that names its ranks, as a pack of one. Packs, and what names no ranks, as they are.

    Args:
        params: `PackedSeqParams`, or None.
        ids: the model's tokens [B, T]; not read where it takes hidden states.
        hidden_states: these [T, B, H], or None.

    Raises:
        ValueError: where it is not one document.
    """
    if params is None or params.qkv_format != "sbhd" or getattr(params, "local_cp_size", None) is None:
        return params
    offsets: Tensor | None = params.cu_seqlens_q
    batch = ids.size(0) if hidden_states is None else hidden_states.size(1)
    if batch != 1 or offsets is None or offsets.numel() != 2:
        raise ValueError(
            "cp_sizes: expected a pack (thd), or one document (sbhd, a batch of 1, two cu_seqlens), "
            f"got sbhd, a batch of {batch}, {0 if offsets is None else offsets.numel()} cu_seqlens"
        )
    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), offsets.to(torch.int32))
    kept = {name: getattr(params, name) for name in _KEPT}
    pack = new_params(type(params), {"qkv_format": "thd", **ends, **kept})
    copy_foreign_attributes(params, pack)
    return pack
