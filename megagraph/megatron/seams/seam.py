# SPDX-License-Identifier: Apache-2.0
"""One function of megatron-core that the plugin wraps or calls, and what a host may have put in its place."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Seam", "below_ours", "called_name", "is_replaced", "made_in"]


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One function of megatron-core that the plugin wraps or calls.

    Args:
        module: where it is looked up when it is called.
        path: dotted name in the module.
        parameters: names that its signature must have, in order as far as they are positional.
    """

    module: str
    path: str
    parameters: tuple[str, ...]

    def owner(self) -> Any:
        """The module or class that holds the function."""
        found: Any = importlib.import_module(self.module)
        for part in self.path.split(".")[:-1]:
            found = getattr(found, part)
        return found

    @property
    def name(self) -> str:
        """Its name in the owner."""
        return self.path.split(".")[-1]

    def function(self) -> Callable[..., Any]:
        """The function as the owner holds it now."""
        found: Callable[..., Any] = getattr(self.owner(), self.name)
        return found

    def is_present(self) -> bool:
        """Whether the installed release has the module that a seam of some releases lies in."""
        try:
            importlib.import_module(self.module)
        except ImportError:
            return False
        return True

    def problem(self) -> str | None:
        """What is wrong with this seam in the installed release, or None."""
        where = f"{self.module}.{self.path}"
        try:
            function = self.function()
        except (ImportError, AttributeError) as error:
            return f"{where} is missing ({error})"
        names = inspect.signature(function).parameters
        missing = [name for name in self.parameters if name not in names]
        return f"{where} has no parameter {', '.join(missing)}" if missing else None


def below_ours(function: Any) -> Any:
    """What a function of ours is wrapped around; any other function itself."""
    while made_in(function).startswith("megagraph."):
        function = function.__wrapped__
    return function


def made_in(function: Any) -> str:
    """The module that a function's code is of. Its `__module__` says less: decorators copy it."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def called_name(function: Any) -> str:
    """Its name and its module's."""
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


def is_replaced(module: Any, seam: Seam) -> bool:
    """Whether a module runs another method than Megatron's, or ours around it, under a seam's name."""
    method: Any = getattr(module, seam.name, None)
    function = getattr(method, "__func__", method)
    while (owner := made_in(function)) != seam.module:
        # Ours, and Megatron's own decorators.
        if not owner.startswith(("megagraph.", "megatron.core.")) or not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False
