# SPDX-License-Identifier: Apache-2.0
"""Keeps what the layers are called with beside hidden states and pack, for each variant of a model."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.megatron.preprocess import layer_constants
from megagraph.megatron.scopes.arguments import Constants

__all__ = ["LayerArguments"]


class LayerArguments(dict[Hashable, Constants]):
    """Rotary tables and the like, by variant.

    Args:
        model: asked for them; weakly, for this lives as long as the model does.

    Attributes:
        forward: what overrides the model's forward and is asked in its place; None for Megatron's.
    """

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        super().__init__()
        self._model = model
        self.forward: Callable[..., Any] | None = None

    def of(self, key: Hashable, params: Any, hidden_states: Tensor) -> Constants:
        """Those of a variant.

        Args:
            key: the variant.
            params: a canonical pack of it.
            hidden_states: of that pack, on the meta device.
        """
        # The first ones stay: graphs of former numeric settings read them.
        if key not in self:
            model = self._model()
            assert model is not None
            self[key] = Constants(layer_constants(model, params, hidden_states, self.forward))
        return self[key]

    def find(self, key: Hashable, params: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """Finds those of a variant of a model whose forward is not Megatron's.

        Args:
            key: the variant.
            params: a canonical pack of it.
            shape: of that pack's hidden states.
            dtype: of them.

        Returns:
            Why they cannot be known beforehand, or None.
        """
        try:
            self.of(key, params, torch.empty(shape, dtype=dtype, device="meta"))
        except Exception as error:  # raised by a forward that we know nothing of
            cause = f"{type(error).__name__}: {error}"
            return f"what its forward hands to the layers depends on more than the pack's capacity ({cause})"
        return None
