# SPDX-License-Identifier: Apache-2.0
"""Where hidden states enter a block that is not a pipeline's first one: set beforehand, not passed."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["standing_in"]


@contextlib.contextmanager
def standing_in(block: Any, hidden_states: Tensor) -> Iterator[None]:
    """While inside, a block that takes what was set runs on these hidden states."""
    before = block.input_tensor
    block.input_tensor = hidden_states
    try:
        yield
    finally:
        block.input_tensor = before
