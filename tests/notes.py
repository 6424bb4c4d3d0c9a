# SPDX-License-Identifier: Apache-2.0
"""What calls of a function are given, which goes on as ever; and settings that are put back afterwards."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch


@contextlib.contextmanager
def told(tell: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Inside, somebody has been told a value; afterwards the one of before."""
    tell(value)
    try:
        yield
    finally:
        tell(before)


precision = partial(told, torch.set_float32_matmul_precision, before="highest")


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
