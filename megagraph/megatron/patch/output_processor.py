# SPDX-License-Identifier: Apache-2.0
"""What a caller has in place of the output layer: it sees the pack and the rows that were given."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["ROW_LISTS", "OnGivenRows"]

# The row lists among a model's arguments, [1, T] each, beside its padding mask.
ROW_LISTS = ("input_ids", "position_ids", "labels", "loss_mask")


class OnGivenRows:
    """An output processor that is handed what it would be handed without the plugin.

    What it returns is of the rows that were given, whatever that is.

    Args:
        processor: the caller's.
        given: arguments of the model as its caller passed them, by name.
        tokens: rows of the pack.
        cut: makes this rank's rows of hidden states those that it has of the pack as it was given, moving
            rows between ranks; None where they are.

    Attributes:
        passed: what the model's forward was called with in place of `given`. What the model has made of that
            stays what it is, less the rows that were added.
    """

    def __init__(
        self,
        processor: Callable[..., Any],
        given: Mapping[str, Any],
        tokens: int,
        cut: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._processor = processor
        self._given = given
        self._tokens = tokens
        self._cut = cut
        self.passed: Mapping[str, Any] = {}

    def __call__(self, **handed: Any) -> Any:
        """Calls the processor."""
        if self._cut is not None:
            handed["hidden_states"] = self._cut(handed["hidden_states"])
        for name, value in handed.items():
            if value is None or name not in self._given:
                continue
            if value is self.passed.get(name):
                handed[name] = self._given[name]
            elif self._cut is not None and name == "decoder_input":  # the embedding's, for one
                handed[name] = self._cut(value)
            elif self._cut is not None and name in ROW_LISTS:
                handed[name] = value[:, : self._tokens]
        return self._processor(**handed)
