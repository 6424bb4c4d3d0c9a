# SPDX-License-Identifier: Apache-2.0
"""Marks the packs in which rotary positions begin anew in each document; knows a model's own rotary tables.

Megatron makes a table of `max_seqlen` rows. Its unfused RoPE begins anew in each document, unless the table
is as long as the pack: then positions go on from document to document. Such packs run as they were given, by
Megatron's rule. A canonical pack has another length and another `max_seqlen`, and may have a table as long as
itself, so its offsets are marked, by which RoPE inside a layer knows it. Whoever runs the layer (a capture,
an eager micro-batch, a recompute in the backward), the offsets are these.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.megatron.seams import has_mla

__all__ = ["OwnTables", "is_canonical", "mark_canonical", "with_canonical_mark"]

_MARK = "_megagraph_is_canonical"
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def mark_canonical(params: Any) -> None:
    """Marks the offsets of a pack, which nobody else holds."""
    for name in _OFFSETS:
        offsets = getattr(params, name)
        if offsets is not None:
            setattr(offsets, _MARK, True)


def with_canonical_mark(params: Any) -> Any:
    """The pack with marked tensors of its own over the same offsets; equal ones stay one."""
    marked = copy.copy(params)
    made: dict[int, Tensor] = {}
    for name in _OFFSETS:
        offsets = getattr(params, name)
        if offsets is not None:
            setattr(marked, name, made.setdefault(id(offsets), offsets.detach()))
    mark_canonical(marked)
    return marked


def is_canonical(offsets: Tensor) -> bool:
    """Whether they are marked."""
    return hasattr(offsets, _MARK)


class OwnTables:
    """Tells the rotary tables that a model makes from others that its layers are handed.

    What a host hands them, frequencies of each token for one, has rows for the pack as it was given.

    Args:
        model: the GPTModel or HybridModel.
        make: asks it what it hands to its layers for a pack and hidden states.

    Attributes:
        depend_on_max_seqlen: it says where positions begin; with fused RoPE they begin anew in each document.
        are_cut: multi-latent attention makes them, and cuts them to the rows of the pack.
        are_handed_on: the layers were handed the model's own when that was last asked; None before.
    """

    def __init__(self, model: nn.Module, make: Callable[[Any, Tensor], Mapping[str, Any]]) -> None:
        self._make = make
        config: Any = model.config
        self.are_cut = has_mla(model)
        has_tables = self.are_cut or getattr(model, "rotary_pos_emb", None) is not None
        self.depend_on_max_seqlen = has_tables and not config.apply_rope_fusion
        self.are_handed_on: bool | None = None
        self._known: dict[int, Tensor] = {}

    def include(self, table: Any, params: Any, hidden_states: Tensor) -> bool:
        """Whether a table is the one that the model makes for a pack.

        Waits for the device where the table was not known and has the shape of the model's own.

        Args:
            table: what the layers are handed.
            params: the pack that the model was given.
            hidden_states: of any pack.
        """
        rows: int = params.max_seqlen_q
        is_own = table is None or table is self._known.get(rows)
        if not is_own:
            try:
                own = self._make(params, hidden_states).get("rotary_pos_emb")
            except Exception:  # a host's model that makes its tables of more than a pack's length
                own = None
            is_own = (
                isinstance(own, Tensor)
                and isinstance(table, Tensor)
                and (own.shape, own.dtype) == (table.shape, table.dtype)
                and torch.equal(own, table)
            )
            if is_own:
                self._known[rows] = table
        self.are_handed_on = is_own
        return is_own
