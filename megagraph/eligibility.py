# SPDX-License-Identifier: Apache-2.0
"""What about a site's module a graph would bypass or double: hooks and shared parameters.

Looks only; captures nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from megagraph import _C
from megagraph.dispatch import EagerReason
from megagraph.sites import SiteSpec

__all__ = ["ineligible_sites"]

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    for name in _MODULE_HOOKS:
        yield from getattr(module, name).values()


def _carries_foreign_hook(
    site: SiteSpec, is_expected: Callable[[Callable[..., Any]], bool], accumulator_hooks: int
) -> str | None:
    for name, module in site.module.named_modules():
        for hook in _hooks(module):
            if not is_expected(hook):
                where = f"{name or type(module).__name__}"
                return f"hook {getattr(hook, '__qualname__', hook)} of module {where}"
    for name, param in site.module.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            return f"gradient hook of parameter {name}"
        if param.requires_grad and _C.count_accumulator_hooks(param) > accumulator_hooks:
            return f"hook on the gradient accumulator of parameter {name}"
    return None


def ineligible_sites(
    sites: Sequence[SiteSpec],
    *,
    other_params: Iterable[nn.Parameter] = (),
    is_expected_hook: Callable[[Callable[..., Any]], bool] = lambda hook: False,
    accumulator_hooks: int = 0,
) -> Mapping[int, tuple[EagerReason, str]]:
    """Sites that must stay eager: rank to the reason and what was found.

    Args:
        sites: a chain.
        other_params: parameters of the model that are used outside of the chain.
        is_expected_hook: hooks that the caller answers for.
        accumulator_hooks: hooks of the caller on each parameter's gradient accumulator.
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
