# SPDX-License-Identifier: Apache-2.0
"""Layouts and tables that the tests of rope_thd share."""

import pytest
import torch
from torch import Tensor

from megagraph.packs.ops import RopeLayout

# To the arguments of the op itself.
INTERLEAVED: tuple[RopeLayout, ...] = ("interleaved", "mla_interleaved")
LAYOUTS: dict[RopeLayout, dict[str, bool]] = {
    "neox": {},
    **{layout: {layout: True} for layout in INTERLEAVED},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def frequencies(positions: int = 32, rotary: int = 8, layout: str = "neox", device: str = "cpu") -> Tensor:
    """Angles as Megatron's RotaryEmbedding makes them, [positions, 1, 1, rotary] in float32."""
    inverse = 1.0 / 10000 ** (torch.arange(0, rotary, 2, device=device) / rotary)
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), inverse)
    pairs = (angles, angles)
    wide = torch.stack(pairs, -1).flatten(1) if layout == "interleaved" else torch.cat(pairs, -1)
    return wide[:, None, None, :]


def tables(freqs: Tensor, dtype: torch.dtype, mscale: float = 1.0) -> tuple[Tensor, Tensor]:
    flat = freqs.flatten(1)
    return (flat.cos() * mscale).to(dtype), (flat.sin() * mscale).to(dtype)
