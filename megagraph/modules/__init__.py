# SPDX-License-Identifier: Apache-2.0
"""What Megatron lacks for packs without Transformer Engine."""

from megagraph.modules.attention import VarlenAttention
from megagraph.modules.experts import GroupedLinear, SortedRows
from megagraph.modules.norm import Norm

__all__ = ["GroupedLinear", "Norm", "SortedRows", "VarlenAttention"]
