# SPDX-License-Identifier: Apache-2.0
"""What layers were captured with beside hidden states and pack, and whether a call has the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Constants"]


class Constants(dict[str, Any]):
    """Arguments that a variant's graphs were captured with, by name. None is left out."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        # The last tensor that equalled a constant, by name.
        self._equal: dict[str, Tensor] = {}

    def are(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call has just these arguments; None is as good as none."""
        given = {name: value for name, value in arguments.items() if value is not None}
        return given.keys() == self.keys() and all(
            value is self[name] or self.is_equal(name, value) for name, value in given.items()
        )

    def is_equal(self, name: str, value: Any) -> bool:
        """Whether an argument that is another object equals the one of the capture.

        Megatron keeps 32 rotary tables, over all models, and makes one that it dropped anew: an equal
        tensor is compared once, which waits for the device, and known from then on.
        """
        known = self.get(name)
        if value is not None and value is self._equal.get(name):
            return True
        if not (isinstance(value, Tensor) and isinstance(known, Tensor)):
            return False
        if value.shape != known.shape or value.dtype != known.dtype or not torch.equal(value, known):
            return False
        self._equal[name] = value
        return True
