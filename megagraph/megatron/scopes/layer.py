# SPDX-License-Identifier: Apache-2.0
"""Scope: a whole transformer layer. Hidden states enter and leave; everything else is constant."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["run_layer"]


def run_layer(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """The first thing that a layer returns; the other is the context of cross attention."""
    out: Tensor
    out, _context = layer(hidden_states=hidden_states, **arguments)
    return out
