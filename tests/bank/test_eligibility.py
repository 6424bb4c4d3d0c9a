# SPDX-License-Identifier: Apache-2.0
"""Hooks and shared parameters, which a graph would bypass or double, are found and named."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from bank_pair import Block, give_main_grads
from torch import Tensor, nn

from megagraph.bank.sites import SiteSpec, ineligible_sites
from megagraph.reasons import EagerReason


def found(modules: Sequence[nn.Module], **options: Any) -> Mapping[int, tuple[EagerReason, str]]:
    return ineligible_sites([SiteSpec(name="a site", module=module) for module in modules], **options)


def keep(*_: object) -> None:
    """A hook that changes nothing."""


def accumulator_of(param: Tensor) -> Any:
    return param.expand_as(param).grad_fn.next_functions[0][0]


OF_PARAMETER = "gradient hook of parameter up.weight"
ON_ACCUMULATOR = "hook on the gradient accumulator of parameter up.weight"
# What registers a hook, on what of a block, and what is said of it.
HOOKS: list[tuple[str, Callable[[Any], Any], str]] = [
    *(
        (
            f"register_{kind}_hook",
            lambda block, where=where: block.get_submodule(where),
            f"hook keep of module {name}",
        )
        for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")
        for where, name in (("", "Block"), ("up", "up"))
    ),
    ("register_hook", lambda block: block.up.weight, OF_PARAMETER),
    ("register_post_accumulate_grad_hook", lambda block: block.up.weight, OF_PARAMETER),
    ("register_hook", lambda block: accumulator_of(block.up.weight), ON_ACCUMULATOR),
    ("register_prehook", lambda block: accumulator_of(block.up.weight), ON_ACCUMULATOR),
]


@pytest.mark.parametrize(("register", "of", "what"), HOOKS)
def test_a_hook_is_found_and_named(register: str, of: Callable[[Any], Any], what: str) -> None:
    modules = [Block(), Block()]
    it = of(modules[1])
    with getattr(it, register)(keep):
        assert found(modules) == {1: (EagerReason.FOREIGN_HOOK, what)}
    assert found(modules) == {}


def test_hooks_that_the_caller_answers_for_are_no_obstacle() -> None:
    module = Block()
    module.register_forward_hook(keep)
    assert found([module], is_expected_hook=lambda hook: hook is keep) == {}
    module.up.register_forward_hook(lambda *_: None)
    assert found([module], is_expected_hook=lambda hook: hook is keep)[0][0] is EagerReason.FOREIGN_HOOK


def test_the_callers_own_accumulator_hooks_are_counted_out() -> None:
    """Bug: Python's hooks on one accumulator share one dictionary, and were counted as one."""
    modules = [Block(), Block()]
    accumulators = give_main_grads(modules)
    assert set(found(modules)) == {0, 1}
    assert set(found(modules, accumulator_hooks=lambda param: 0)) == {0, 1}
    assert found(modules, accumulator_hooks=lambda param: 1) == {}
    with accumulator_of(modules[1].norm.bias).register_hook(keep):
        assert set(found(modules, accumulator_hooks=lambda param: 1)) == {1}
    assert found(modules, accumulator_hooks=lambda param: 1) == {}
    del accumulators


def test_a_hook_of_the_callers_that_is_gone_is_found() -> None:
    """Eager no longer adds to the main gradient, so neither may a graph."""
    reason, what = found([Block()], accumulator_hooks=lambda param: 1)[0]
    assert reason is EagerReason.FOREIGN_HOOK and "has lost its hook" in what


def test_what_is_no_obstacle() -> None:
    """Frozen parameters, which have no accumulator to look at; and one that is used twice within one site."""
    frozen, twice = Block().requires_grad_(False), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    twice[1].weight = twice[0].weight
    assert found([frozen, twice, nn.Tanh(), Block()]) == {}


USED_ELSEWHERE = "parameter up.weight is used elsewhere too"


def test_what_is_used_twice_leaves_each_site_eager_whatever_hooks_there_are() -> None:
    """A parameter of two sites, a module that runs twice, and a parameter used outside of the bank."""
    modules, shared = [Block(), Block(), Block()], (EagerReason.SHARED_PARAMETER, USED_ELSEWHERE)
    modules[2].up.weight = modules[0].up.weight
    assert found(modules) == {0: shared, 2: shared}
    assert set(found([modules[1], nn.Tanh(), modules[1]])) == {0, 2}
    modules[1].register_forward_hook(keep)
    tied = nn.Linear(1, 1)
    tied.weight = modules[1].up.weight
    assert found([nn.Tanh(), modules[1]], other_params=tied.parameters()) == {1: shared}
    assert torch.is_grad_enabled()
