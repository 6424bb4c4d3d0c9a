# SPDX-License-Identifier: Apache-2.0
"""THD RoPE that can be captured, with Megatron's rotary frequencies turned into tables once.

Does not compute frequencies and does not fuse with attention.
"""

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from megagraph.packs import ops

__all__ = ["RotaryTables"]


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
        self._tables: dict[int, tuple[weakref.ref[Any], dict[Hashable, list[_Pair]]]] = {}

    def tables(self, freqs: Tensor, dtype: torch.dtype, mscale: float) -> tuple[Tensor, Tensor]:
        """Tables of [positions, rotary dimension] in `dtype`.

        Args:
            freqs: [positions, 1, 1, rotary dimension], float32.
            dtype: of the tensors to rotate.
            mscale: YaRN's magnitude scale.
        """
        known = self._of_memory(freqs.untyped_storage())
        rows = freqs.size(0)
        key = freqs.storage_offset(), freqs.shape[1:], freqs.stride(), freqs.dtype, dtype, mscale
        pairs = known.setdefault(key, [])
        if not pairs or pairs[-1][0].size(0) < rows:
            flat = freqs.detach().reshape(rows, -1)
            cos, sin = ((trig(flat) * mscale).to(dtype) for trig in (torch.cos, torch.sin))
            pairs.append((cos, sin))
        cos, sin = pairs[-1]
        return (cos, sin) if cos.size(0) == rows else (cos[:rows], sin[:rows])

    def _of_memory(self, storage: Any) -> dict[Hashable, list[_Pair]]:
        place = id(storage)  # of an object that lives as long as the memory does
        found = self._tables.get(place)
        if found is None or found[0]() is not storage:
            found = weakref.ref(storage, lambda _: self._tables.pop(place, None)), {}
            self._tables[place] = found
        return found[1]

    def rotate(
        self,
        t: Tensor,
        freqs: Tensor,
        cu_seqlens_padded: Tensor,
        *,
        layout: ops.RopeLayout = "neox",
        mscale: float = 1.0,
        cp_size: int = 1,
        cp_rank: int = 0,
    ) -> Tensor:
        """Rotates queries or keys [T, H, D] by their position in their document; tail rows are zero."""
        cos, sin = self.tables(freqs, t.dtype, mscale)
        (out,) = ops.rope_thd(
            [t],
            cos,
            sin,
            cu_seqlens_padded,
            layout=layout,
            cp_size=cp_size,
            cp_rank=cp_rank,
        )
        return out
