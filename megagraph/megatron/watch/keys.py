# SPDX-License-Identifier: Apache-2.0
"""State that only its owner knows: functions that a host has named for modules."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["WatchHandle", "keys_of", "watch"]

Key = Callable[[], Any]

# The functions hold whatever they hold; the modules are held weakly.
_keys: weakref.WeakKeyDictionary[nn.Module, list[Key]] = weakref.WeakKeyDictionary()
# How often functions came or went; read between steps.
num_changes = 0


class WatchHandle:
    """Takes a function back that `watch()` was given.

    Args:
        module: for which it was given.
        key: the function.
    """

    def __init__(self, module: nn.Module, key: Key) -> None:
        self._module = weakref.ref(module)
        self._key = key

    def remove(self) -> None:
        """Takes it back; a second time does nothing."""
        global num_changes
        module = self._module()
        keys = [] if module is None else _keys.get(module, [])
        if self._key in keys:
            keys.remove(self._key)
            num_changes += 1


def watch(module: nn.Module, *, key: Key) -> WatchHandle:
    """Makes what `key()` returns part of the state that graphs of a module are captured in.

    For state that a forward reads and that stands in no attribute of a module: a variable of a closure, a
    global, an environment variable. Where another value is returned than when the layers were captured, they
    run eager (`STATE_CHANGED`), and are captured for that value too.

    Args:
        module: a layer, any module inside, or the model around it.
        key: called without arguments before each call of the model. What it returns is compared by value
            where it is a number, a flag, text, an enumeration, or a tuple, list, set or dictionary of
            these; anything else by identity.

    Returns:
        A handle: `handle.remove()` takes the function back.

    Raises:
        TypeError: where one of the two is something else, naming it.
    """
    global num_changes
    if not isinstance(module, nn.Module):
        raise TypeError(f"watch(): expected a torch.nn.Module, got {type(module).__name__}")
    if not callable(key):
        raise TypeError(f"watch(): key: expected a function without arguments, got {type(key).__name__}")
    _keys.setdefault(module, []).append(key)
    num_changes += 1
    return WatchHandle(module, key)


def keys_of(model: nn.Module) -> list[Key]:
    """The functions for a model, for what is inside of it, and for what it is inside of."""
    if not _keys:
        return []
    inside = set(model.modules())
    return [
        key
        for module, keys in _keys.items()
        if module in inside or any(child is model for child in module.modules())
        for key in keys
    ]
