# SPDX-License-Identifier: Apache-2.0
"""Scope: the MLP with its norm and residual, of a dense layer whose attention stays eager.

| enters | runs | leaves |
|---|---|---|
| hidden states after attention | norm, MLP, dropout, residual | hidden states |
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megagraph.megatron.scopes.halves import Half

__all__ = ["MLP"]


def _run(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    out: Tensor = layer._forward_mlp(hidden_states, padding_mask=arguments.get("padding_mask"))
    return out


MLP = Half(name="mlp", core="mlp", children=("pre_mlp_layernorm", "mlp", "mlp_bda"), run=_run)
