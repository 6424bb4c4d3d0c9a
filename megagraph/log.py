# SPDX-License-Identifier: Apache-2.0
"""The log, spoken by rank 0, and of a pipeline by one rank of each stage: others keep to warnings.

What is not rank 0's carries its rank.

Configures nothing: the lines go to the logger `megagraph`, and where nobody set up logging Python shows its
warnings on standard error.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

import torch

__all__ = ["PATIENCE", "about", "let_speak", "log", "rank", "subject"]

PATIENCE = 20  # steps that somebody waits, before it is said

# The model whose turn it is, for the log; `about()` sets it.
subject: ContextVar[str] = ContextVar("megagraph_subject", default="")
_last_rank = 0
_speaks = False  # for its stage


def rank() -> int:
    """This process's rank: `RANK`, else torch.distributed's, also after its groups are gone; else 0."""
    global _last_rank
    variable = os.environ.get("RANK", "")
    if variable.isdecimal():
        return int(variable)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _last_rank = torch.distributed.get_rank()
    return _last_rank


def let_speak(speaks: bool) -> None:
    """Lets this rank say what rank 0 would, of models that rank 0 does not run; or no more."""
    global _speaks
    _speaks = speaks


@contextlib.contextmanager
def about(model: str) -> Iterator[None]:
    """Inside, every line of the log begins with the model's name."""
    token = subject.set(model)
    try:
        yield
    finally:
        subject.reset(token)


class _RankLog(logging.LoggerAdapter):  # type: ignore[type-arg]  # takes none at run time before Python 3.11
    """Drops what ranks say below a warning that do not speak for others, and labels the rest."""

    def isEnabledFor(self, level: int) -> bool:
        return (level >= logging.WARNING or _speaks or rank() == 0) and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        # Python's handler of last resort shows the message alone.
        name = "" if self.logger.hasHandlers() else "megagraph: "
        label = f"[rank {rank()}] " if rank() else ""
        model = f"{subject.get()}: " if subject.get() else ""
        return f"{name}{label}{model}{msg}", kwargs


log = _RankLog(logging.getLogger("megagraph"), {})
