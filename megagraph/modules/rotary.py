# SPDX-License-Identifier: Apache-2.0
"""THD RoPE that can be captured, with Megatron's rotary frequencies turned into tables once.

Does not compute frequencies and does not fuse with attention.
"""

import weakref

import torch
from torch import Tensor

from megagraph.packs import ops

__all__ = ["RotaryTables"]


class RotaryTables:
    """cos and sin tables of rotary frequencies, kept as long as the frequencies live.

    Megatron's unfused path takes the cosine of the whole table in every layer, for queries and for
    keys; here it is taken once for each dtype and mscale, with the same roundings
    (csrc/ops/rope_rotation.h, Note [RoPE bits]).
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, torch.dtype, float], tuple[weakref.ref[Tensor], Tensor, Tensor]] = {}

    def tables(self, freqs: Tensor, dtype: torch.dtype, mscale: float) -> tuple[Tensor, Tensor]:
        """Tables of [positions, rotary dimension] in `dtype`.

        Args:
            freqs: [positions, 1, 1, rotary dimension], float32.
            dtype: of the tensors to rotate.
            mscale: YaRN's magnitude scale.
        """
        key = (id(freqs), dtype, mscale)
        found = self._tables.get(key)
        if found is not None and found[0]() is freqs:
            return found[1], found[2]
        flat = freqs.detach().reshape(freqs.size(0), -1)
        cos, sin = ((trig(flat) * mscale).to(dtype) for trig in (torch.cos, torch.sin))
        self._tables[key] = (weakref.ref(freqs, lambda _: self._tables.pop(key, None)), cos, sin)
        return cos, sin

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
