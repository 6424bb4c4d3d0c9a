# SPDX-License-Identifier: Apache-2.0
"""Scope: attention with its norm and residual, of a layer whose MLP stays eager.

| enters | runs | leaves |
|---|---|---|
| hidden states; the pack's offsets and tables | norm, attention, dropout, residual | hidden states |

What leaves is saved by the norm of the MLP, and stays until its backward.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megagraph.megatron.scopes.halves import Half

__all__ = ["ATTENTION"]


def _run(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    out: Tensor
    out, _context = layer._forward_attention(hidden_states=hidden_states, **arguments)
    return out


ATTENTION = Half(
    name="attn",
    core="self_attention",
    children=(
        "input_layernorm",
        "self_attention",
        "self_attn_bda",
        "pre_cross_attn_layernorm",
        "cross_attention",
        "cross_attn_bda",
    ),
    run=_run,
)
