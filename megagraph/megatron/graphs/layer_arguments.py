# SPDX-License-Identifier: Apache-2.0
"""Keeps what the layers are called with beside hidden states and pack, for each variant of a model.

They are the model's own answer, and not made here, since Megatron's options change from release to release. A
model whose forward is not Megatron's runs as far as its decoder, once for each variant and without tokens or
positions; what it hands over must then be the same in each micro-batch.
"""

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.megatron.graphs.micro_batch import MicroBatch
from megagraph.megatron.preprocess import Constants, layer_constants

__all__ = ["LayerArguments"]


class LayerArguments(dict[Hashable, Constants]):
    """Rotary tables and the like, by variant.

    Args:
        model: asked for them; weakly, for this lives as long as the model does.
        is_overridden: asked whether its own forward is to be asked in place of Megatron's.
    """

    def __init__(self, model: weakref.ref[nn.Module], is_overridden: Callable[[], bool]) -> None:
        super().__init__()
        self._model = model
        self._is_overridden = is_overridden

    def of(self, key: Hashable, params: Any, hidden_states: Tensor) -> Constants:
        """Those of a variant.

        Args:
            key: the variant.
            params: a canonical pack of it.
            hidden_states: of that pack, on the meta device.
        """
        # The first ones stay: graphs of former numeric settings read them.
        if key not in self:
            self[key] = Constants(self.make(params, hidden_states))
        return self[key]

    def make(self, params: Any, hidden_states: Tensor) -> Mapping[str, Any]:
        """Those of a pack, as the model makes them now."""
        model = self._model()
        assert model is not None
        return layer_constants(model, params, hidden_states, is_overridden=self._is_overridden())

    def find(self, batch: MicroBatch, rows: int, row_shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """Finds those of a variant of a model whose forward is not Megatron's.

        Args:
            batch: a micro-batch of the variant.
            rows: of its canonical pack's hidden states.
            row_shape: of one of them.
            dtype: of them.

        Returns:
            Why they cannot be known beforehand, or None.
        """
        if batch.key in self:
            return None
        hidden = torch.empty((rows, *row_shape), dtype=dtype, device="meta")
        try:
            self.of(batch.key, batch.canonical_params(), hidden)
        except Exception as error:  # raised by a forward that we know nothing of
            cause = f"{type(error).__name__}: {error}"
            return f"what its forward hands to the layers depends on more than the pack's capacity ({cause})"
        return None
