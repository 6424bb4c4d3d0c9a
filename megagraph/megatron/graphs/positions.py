# SPDX-License-Identifier: Apache-2.0
"""Which row of its rotary table each row of a pack is rotated by.

Megatron makes a table of `max_seqlen` rows. Its unfused RoPE maps rows exactly where the table is as long as
the pack, and otherwise begins anew in each document. A canonical pack has another length and another
`max_seqlen`, so it remembers what the pack as given meant: on its offsets, by which RoPE inside a layer knows
it. Multi-latent attention makes tables of its own, by the same rule, and cuts them to the rows of its pack.
Whoever runs the layer (a capture, an eager micro-batch, a recompute in the backward), the offsets are
these, and no other pack has them.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.megatron.seams import has_latent_attention

__all__ = [
    "OwnTables",
    "remember_positions",
    "rows_are_positions",
    "with_positions",
    "without_positions",
]

_MARK = "_megagraph_rows_are_positions"


def remember_positions(params: Any, are_rows: bool) -> None:
    """Marks the offsets of a canonical pack, which nobody else holds.

    Args:
        params: its `PackedSeqParams`.
        are_rows: each row is rotated by the table's row of the same index.
    """
    for offsets in (params.cu_seqlens_q, params.cu_seqlens_q_padded):
        if offsets is not None:
            setattr(offsets, _MARK, are_rows)


_OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def _with_other_offsets(params: Any) -> Any:
    """The same pack with tensors of its own over the same offsets; equal ones stay one."""
    other = copy.copy(params)
    made: dict[int, Tensor] = {}
    for name in _OFFSETS:
        offsets = getattr(params, name)
        if offsets is not None:
            setattr(other, name, made.setdefault(id(offsets), offsets.detach()))
    return other


def with_positions(params: Any, are_rows: bool) -> Any:
    """The pack with marked offsets; those of the caller stay as they are."""
    marked = _with_other_offsets(params)
    remember_positions(marked, are_rows)
    return marked


def without_positions(params: Any) -> Any:
    """The pack with offsets that bear no mark."""
    return _with_other_offsets(params)


def rows_are_positions(offsets: Tensor) -> bool | None:
    """What was remembered; None for the offsets of any pack but a canonical one."""
    found: bool | None = getattr(offsets, _MARK, None)
    return found


class OwnTables:
    """Tells the rotary tables that a model makes from others that its layers are handed.

    What a host hands them, frequencies of each token for one, has rows for the pack as it was given.

    Args:
        model: the GPTModel or HybridModel.
        make: asks it what it hands to its layers for a pack and hidden states.
    """

    def __init__(self, model: nn.Module, make: Callable[[Any, Tensor], Mapping[str, Any]]) -> None:
        self._make = make
        # Whether `max_seqlen` says where positions begin; fused RoPE begins anew in each document.
        config: Any = model.config
        # Multi-latent attention makes them, and cuts them to the rows of the pack.
        self.are_cut = has_latent_attention(model)
        has_tables = self.are_cut or getattr(model, "rotary_pos_emb", None) is not None
        self.depend_on_max_seqlen = has_tables and not config.apply_rope_fusion
        self._known: dict[int, Tensor] = {}

    def hold(self, table: Any, params: Any, hidden_states: Tensor) -> bool:
        """Whether a table is the one that the model makes for a pack.

        Waits for the device where the table was not known and has the shape of the model's own.

        Args:
            table: what the layers are handed.
            params: the canonical pack.
            hidden_states: of any pack.
        """
        rows: int = params.max_seqlen_q
        if table is None or table is self._known.get(rows):
            return True
        try:
            own = self._make(params, hidden_states).get("rotary_pos_emb")
        except Exception:  # a host's model that makes its tables of more than a pack's length
            return False
        if not (isinstance(own, Tensor) and isinstance(table, Tensor)):
            return False
        if own.shape != table.shape or own.dtype != table.dtype or not torch.equal(own, table):
            return False
        self._known[rows] = table
        return True
