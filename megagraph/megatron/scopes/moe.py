# SPDX-License-Identifier: Apache-2.0
"""Scope: the experts of a layer with their router, norm and residual. They stay eager.

| enters | runs | leaves |
|---|---|---|
| hidden states after attention; padding mask | norm, router, experts, residual | hidden states |
"""

from typing import Any

from torch import nn

from megagraph.megatron.scopes.halves import Half
from megagraph.megatron.scopes.mlp import run_mlp

__all__ = ["EXPERTS", "experts_of"]


def experts_of(layer: nn.Module) -> Any:
    """The MoELayer of a transformer layer, of Megatron's class or derived from it; None where it has none."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    mlp = getattr(layer, "mlp", None)
    return mlp if isinstance(mlp, BaseMoELayer) else None


EXPERTS = Half(
    name="experts",
    core="mlp",
    children=("pre_mlp_layernorm", "mlp", "mlp_bda"),
    run=run_mlp,
    accepts=lambda layer: experts_of(layer) is not None,
    why_eager="its experts wait for the device; write cuda_graph_modules = ['attn'] to graph its attention",
)
