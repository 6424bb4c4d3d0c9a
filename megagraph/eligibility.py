# SPDX-License-Identifier: Apache-2.0
"""What about a site's module a graph would bypass or double: hooks and shared parameters.

Looks only; captures nothing.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from megagraph import _C
from megagraph.dispatch import EagerReason
from megagraph.sites import SiteSpec

__all__ = ["HookWatch", "ineligible_sites"]

# csrc/python/fingerprint.cpp reads the same tables.
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    for name in _MODULE_HOOKS:
        yield from getattr(module, name).values()


def _carries_foreign_hook(
    site: SiteSpec,
    is_expected: Callable[[Callable[..., Any]], bool],
    accumulator_hooks: Callable[[nn.Parameter], int],
) -> str | None:
    for name, module in site.module.named_modules():
        for hook in _hooks(module):
            if not is_expected(hook):
                where = f"{name or type(module).__name__}"
                return f"hook {getattr(hook, '__qualname__', hook)} of module {where}"
    for name, param in site.module.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            return f"gradient hook of parameter {name}"
        if not param.requires_grad:
            continue
        found, expected = _C.count_accumulator_hooks(param), accumulator_hooks(param)
        if found > expected:
            return f"hook on the gradient accumulator of parameter {name}"
        if found < expected:
            return f"the gradient accumulator of parameter {name} has lost its hook, and eager its gradient"
    return None


class HookWatch:
    """Notices, cheaply, that hooks of some modules came or went.

    Args:
        modules: whose hooks, submodules and parameters included.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        owners = [child for module in modules for child in module.modules()]
        # Weakly, and the tables not at all: a hook may hold the model.
        self._owners = [weakref.ref(owner) for owner in owners]
        self._params = [weakref.ref(p) for owner in owners for p in owner.parameters(recurse=False)]
        self._seen = self._look()

    def _look(self) -> tuple[list[tuple[int, ...]], int, int]:
        # Handles are numbered through, so that keys tell hooks apart.
        owners = [owner for ref in self._owners if (owner := ref()) is not None]
        params = [param for ref in self._params if (param := ref()) is not None]
        tables = (getattr(owner, name) for owner in owners for name in _MODULE_HOOKS)
        keys = [tuple(table) for table in tables if table]
        on_tensors = sum(len(param._backward_hooks or ()) for param in params)
        on_tensors += sum(len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) for param in params)
        on_accumulators = sum(map(_C.count_accumulator_hooks, params))
        return keys, on_tensors, on_accumulators

    def has_changed(self) -> bool:
        """Whether there are other hooks than when this watch was made."""
        return self._look() != self._seen


def ineligible_sites(
    sites: Sequence[SiteSpec],
    *,
    other_params: Iterable[nn.Parameter] = (),
    is_expected_hook: Callable[[Callable[..., Any]], bool] = lambda hook: False,
    accumulator_hooks: Callable[[nn.Parameter], int] = lambda param: 0,
) -> Mapping[int, tuple[EagerReason, str]]:
    """Sites that must stay eager: rank to the reason and what was found.

    Args:
        sites: a chain.
        other_params: parameters of the model that are used outside of the chain.
        is_expected_hook: hooks that the caller answers for.
        accumulator_hooks: how many hooks the caller has on a parameter's gradient accumulator. Tensors that
            are moved to another device by `param.data = ...` lose theirs.
    """
    uses = Counter(id(param) for site in sites for param in set(site.module.parameters()))
    uses.update({id(param) for param in other_params})
    found: dict[int, tuple[EagerReason, str]] = {}
    for rank, site in enumerate(sites):
        shared = [name for name, param in site.module.named_parameters() if uses[id(param)] > 1]
        hook = _carries_foreign_hook(site, is_expected_hook, accumulator_hooks)
        if shared:
            found[rank] = EagerReason.SHARED_PARAMETER, f"parameter {shared[0]} is used elsewhere too"
        elif hook is not None:
            found[rank] = EagerReason.FOREIGN_HOOK, hook
    return found
