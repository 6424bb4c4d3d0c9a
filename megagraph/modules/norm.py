# SPDX-License-Identifier: Apache-2.0
"""A norm for Megatron's specs that takes sequence parallelism, which core's plain torch norm refuses.

Does not reduce gradients: it marks its parameters, and Megatron's `finalize_model_grads` does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Norm"]


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, as the config says, with torch's own bits.

    The constructor takes what Megatron's specs give a norm; parameters have the names, shapes and dtype
    of `torch.nn.LayerNorm` and `torch.nn.RMSNorm`. Under sequence parallelism each rank normalizes its
    own rows, so the parameters are marked `sequence_parallel`, and Megatron sums their gradients over
    the tensor-parallel ranks. `persist_layer_norm` names a kernel of Apex and is not read.

    Args:
        config: Megatron's `TransformerConfig`: `normalization`, `layernorm_zero_centered_gamma`,
            `sequence_parallel`.
        hidden_size: entries of the last dimension.
        eps: added to the variance, or to the mean square.

    Raises:
        ValueError: naming the option of the config that this norm does not have.
    """

    bias: nn.Parameter | None

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(
                f"Norm: expected normalization 'LayerNorm' or 'RMSNorm', got {config.normalization!r}"
            )
        if config.memory_efficient_layer_norm:
            raise ValueError("Norm: expected memory_efficient_layer_norm False, got True")
        self.normalization: str = config.normalization
        self.is_zero_centered: bool = config.layernorm_zero_centered_gamma
        self.normalized_shape = (hidden_size,)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if self.normalization == "LayerNorm" else None
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Makes the scale one and the shift zero."""
        nn.init.constant_(self.weight, 0.0 if self.is_zero_centered else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalizes [..., hidden_size]; shape and dtype stay."""
        weight = self.weight + 1 if self.is_zero_centered else self.weight
        if self.bias is None:
            return F.rms_norm(hidden_states, self.normalized_shape, weight, self.eps)
        return F.layer_norm(hidden_states, self.normalized_shape, weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        centered = ", zero-centered" if self.is_zero_centered else ""
        return f"{self.normalization}, {self.normalized_shape[0]}, eps={self.eps}{centered}"
