# SPDX-License-Identifier: Apache-2.0
"""Notices, cheaply, that hooks of captured modules came or went."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from megagraph import _C
from megagraph.bank.eligibility import MODULE_HOOKS

__all__ = ["HookWatch"]


def _global_tables() -> list[dict[int, Any]]:
    return [getattr(nn.modules.module, f"_global{name}") for name in MODULE_HOOKS]


class HookWatch:
    """Notices, cheaply, that hooks of some modules came or went.

    Args:
        modules: whose hooks, those on their own parameters included.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        owners = list(modules)
        # Weakly, and the tables not at all: a hook may hold the model.
        self._owners = [weakref.ref(owner) for owner in owners]
        self._params = [weakref.ref(p) for owner in owners for p in owner.parameters(recurse=False)]
        self._seen = self._look()

    def _look(self) -> tuple[list[tuple[int, ...]], int, int]:
        # Handles are numbered through, so that keys tell hooks apart.
        owners = [owner for ref in self._owners if (owner := ref()) is not None]
        params = [param for ref in self._params if (param := ref()) is not None]
        tables = (getattr(owner, name) for owner in owners for name in MODULE_HOOKS)
        keys = [tuple(table) for table in (*tables, *_global_tables()) if table]
        on_tensors = sum(len(param._backward_hooks or ()) for param in params)
        on_tensors += sum(len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) for param in params)
        on_accumulators = sum(map(_C.count_accumulator_hooks, params))
        return keys, on_tensors, on_accumulators

    def has_changed(self) -> bool:
        """Whether there are other hooks than when this watch was made."""
        return self._look() != self._seen
