# SPDX-License-Identifier: Apache-2.0
"""Scope: a whole layer. Hidden states enter and leave; everything else is constant."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megagraph.megatron.scopes.mamba import given_to_mamba, is_mamba

__all__ = ["run_layer"]


def run_layer(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """The hidden states that a layer returns, alone or before the context of cross attention."""
    if is_mamba(layer):
        arguments = given_to_mamba(arguments)
    out: Any = layer(hidden_states=hidden_states, **arguments)
    hidden: Tensor = out[0] if isinstance(out, tuple) else out
    return hidden
