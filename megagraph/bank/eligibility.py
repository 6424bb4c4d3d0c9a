# SPDX-License-Identifier: Apache-2.0
"""What about a site's module a graph would bypass or double: hooks and shared parameters.

Looks only; captures nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megagraph import _C
from megagraph.bank.sites import SiteSpec
from megagraph.decide.reasons import EagerReason

__all__ = ["ineligible_sites"]

# csrc/watch/state_items.cpp reads the same tables.
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ALL_MODULES = tuple(f"_global{name}" for name in _MODULE_HOOKS)


def _hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    for name in _MODULE_HOOKS:
        yield from getattr(module, name).values()


def _global_hook(is_expected: Callable[[Callable[..., Any]], bool]) -> str | None:
    for name in _OF_ALL_MODULES:
        for hook in getattr(torch.nn.modules.module, name).values():
            if not is_expected(hook):
                return f"hook {getattr(hook, '__qualname__', hook)} of all modules"
    return None


def _carries_foreign_hook(
    site: SiteSpec,
    is_expected: Callable[[Callable[..., Any]], bool],
    accumulator_hooks: Callable[[nn.Parameter], int],
) -> str | None:
    for name, module in site.named_modules():
        for hook in _hooks(module):
            if not is_expected(hook):
                where = f"{name or type(module).__name__}"
                return f"hook {getattr(hook, '__qualname__', hook)} of module {where}"
    for name, param in site.named_parameters():
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


def ineligible_sites(
    sites: Sequence[SiteSpec],
    *,
    other_params: Iterable[nn.Parameter] = (),
    is_expected_hook: Callable[[Callable[..., Any]], bool] = lambda hook: False,
    accumulator_hooks: Callable[[nn.Parameter], int] = lambda param: 0,
) -> Mapping[int, tuple[EagerReason, str]]:
    """Sites that must stay eager: index to the reason and what was found.

    Args:
        sites: of one bank.
        other_params: parameters of the model that are used outside of these.
        is_expected_hook: hooks that the caller answers for.
        accumulator_hooks: how many hooks the caller has on a parameter's gradient accumulator. Tensors that
            are moved to another device by `param.data = ...` lose theirs.
    """
    uses = Counter(id(param) for site in sites for param in site.parameters())
    uses.update({id(param) for param in other_params})
    found: dict[int, tuple[EagerReason, str]] = {}
    global_hook = _global_hook(is_expected_hook)
    for index, site in enumerate(sites):
        shared = [name for name, param in site.named_parameters() if uses[id(param)] > 1]
        hook = global_hook or _carries_foreign_hook(site, is_expected_hook, accumulator_hooks)
        if shared:
            found[index] = EagerReason.SHARED_PARAMETER, f"parameter {shared[0]} is used elsewhere too"
        elif hook is not None:
            found[index] = EagerReason.FOREIGN_HOOK, hook
    return found
