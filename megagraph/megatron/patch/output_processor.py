# SPDX-License-Identifier: Apache-2.0
"""What a caller has in place of the output layer: it sees the pack and the rows that were given."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["on_given_rows"]


def on_given_rows(
    processor: Callable[..., Any], given: Mapping[str, Any], cut: Callable[[Tensor], Tensor] | None
) -> Callable[..., Any]:
    """An output processor that is handed what it would be handed without the plugin.

    What it returns is of the rows that were given, whatever that is.

    Args:
        processor: the caller's.
        given: arguments of the model as its caller passed them, by name.
        cut: makes this rank's rows of hidden states those that it has of the pack as it was given, moving
            rows between ranks; None where they are.
    """

    def process(**handed: Any) -> Any:
        if cut is not None:
            handed["hidden_states"] = cut(handed["hidden_states"])
            if given["decoder_input"] is None:  # the embedding's
                handed["decoder_input"] = cut(handed["decoder_input"])
        as_given = {name: value for name, value in given.items() if value is not None and name in handed}
        return processor(**{**handed, **as_given})

    return process
