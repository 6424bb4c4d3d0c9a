# SPDX-License-Identifier: Apache-2.0
"""What Megatron lacks for packs without Transformer Engine."""

from megagraph.modules.experts import GroupedLinear, SortedRows
from megagraph.modules.local import Norm, VarlenAttention

__all__ = ["GroupedLinear", "Norm", "SortedRows", "VarlenAttention"]
