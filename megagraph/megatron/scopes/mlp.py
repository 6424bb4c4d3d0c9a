# SPDX-License-Identifier: Apache-2.0
"""Scope: the MLP with its norm and residual, of a dense layer whose attention stays eager.

| enters | runs | leaves |
|---|---|---|
| hidden states after attention | norm, MLP, dropout, residual | hidden states |
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megagraph.megatron.scopes.halves import Half

__all__ = ["MLP", "run_mlp"]


def run_mlp(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """The second half of a layer, whatever its `mlp` is.

    Args:
        layer: a TransformerLayer.
        hidden_states: [rows, 1, H], after attention.
        arguments: of the layer.
    """
    out: Tensor = layer._forward_mlp(hidden_states, padding_mask=arguments.get("padding_mask"))
    return out


def _is_dense(layer: nn.Module) -> bool:
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    return not isinstance(getattr(layer, "mlp", None), BaseMoELayer)


MLP = Half(
    name="mlp",
    core="mlp",
    children=("pre_mlp_layernorm", "mlp", "mlp_bda"),
    run=run_mlp,
    accepts=_is_dense,
)
