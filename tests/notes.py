# SPDX-License-Identifier: Apache-2.0
"""What calls of a function are given, which goes on as ever."""

from collections.abc import Callable
from typing import Any

import pytest


def noting(
    patch: pytest.MonkeyPatch,
    owner: Any,  # module or class
    name: str,
    note: Callable[..., Any] = lambda *_args, **_given: None,  # what is noted of a call, of its arguments
    *,
    wrap: Callable[..., Any] = lambda function: function,  # as its class declares it
) -> list[Any]:
    """The notes of all calls from now on, made before each."""
    original, notes = getattr(owner, name), list[Any]()

    def noted(*args: Any, **given: Any) -> Any:
        notes.append(note(*args, **given))
        return original(*args, **given)

    patch.setattr(owner, name, wrap(noted))
    return notes
