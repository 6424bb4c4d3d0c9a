# SPDX-License-Identifier: Apache-2.0
"""Hooks and shared parameters, which a graph would bypass or double, are found and named."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from bank_pair import Block, give_main_grads
from torch import Tensor, nn

from megagraph.bank.sites import SiteSpec, ineligible_sites
from megagraph.decide.reasons import EagerReason


def sites(modules: Sequence[nn.Module]) -> list[SiteSpec]:
    return [SiteSpec(name=str(index), module=module) for index, module in enumerate(modules)]


def found(modules: Sequence[nn.Module], **options: Any) -> Mapping[int, tuple[EagerReason, str]]:
    return ineligible_sites(sites(modules), **options)


def keep(*_: object) -> None:
    """A hook that changes nothing."""


MODULE_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(keep),
    "forward pre": lambda module: module.register_forward_pre_hook(keep),
    "forward with keywords": lambda module: module.register_forward_hook(keep, with_kwargs=True),
    "full backward": lambda module: module.register_full_backward_hook(keep),
    "full backward pre": lambda module: module.register_full_backward_pre_hook(keep),
}


def accumulator_of(param: Tensor) -> Any:
    return param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@pytest.mark.parametrize("register", MODULE_HOOKS.values(), ids=MODULE_HOOKS.keys())
@pytest.mark.parametrize("where", ["", "up"], ids=["outer", "inner"])
def test_a_hook_of_a_module_is_found_and_named(register: Callable[[nn.Module], Any], where: str) -> None:
    modules = [Block(), Block()]
    handle = register(modules[1].get_submodule(where))
    ((index, (reason, what)),) = found(modules).items()
    assert (index, reason) == (1, EagerReason.FOREIGN_HOOK)
    assert what == f"hook keep of module {where or 'Block'}"
    handle.remove()
    assert found(modules) == {}


def test_hooks_that_the_caller_answers_for_are_no_obstacle() -> None:
    module = Block()
    module.register_forward_hook(keep)
    assert found([module], is_expected_hook=lambda hook: hook is keep) == {}
    module.up.register_forward_hook(lambda *_: None)
    assert found([module], is_expected_hook=lambda hook: hook is keep)[0][0] is EagerReason.FOREIGN_HOOK


@pytest.mark.parametrize(
    ("method", "hooked", "what"),
    [
        ("register_hook", lambda param: param, "gradient hook of"),
        ("register_post_accumulate_grad_hook", lambda param: param, "gradient hook of"),
        ("register_hook", accumulator_of, "hook on the gradient accumulator of"),
        ("register_prehook", accumulator_of, "hook on the gradient accumulator of"),
    ],
)
def test_a_hook_of_a_parameter_or_its_accumulator_is_found_and_named(
    method: str, hooked: Callable[[Tensor], Any], what: str
) -> None:
    module = Block()
    it = hooked(module.up.weight)
    handle = getattr(it, method)(keep)
    assert found([module]) == {0: (EagerReason.FOREIGN_HOOK, f"{what} parameter up.weight")}
    handle.remove()
    assert found([module]) == {}


def test_the_callers_own_accumulator_hooks_are_counted_out() -> None:
    """Bug: Python's hooks on one accumulator share one dictionary, and were counted as one."""
    modules = [Block(), Block()]
    accumulators = give_main_grads(modules)
    assert set(found(modules)) == {0, 1}
    assert set(found(modules, accumulator_hooks=lambda param: 0)) == {0, 1}
    assert found(modules, accumulator_hooks=lambda param: 1) == {}
    handle = accumulator_of(modules[1].norm.bias).register_hook(keep)
    assert set(found(modules, accumulator_hooks=lambda param: 1)) == {1}
    handle.remove()
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


def test_a_parameter_of_two_sites_leaves_both_eager() -> None:
    modules = [Block(), Block(), Block()]
    modules[2].up.weight = modules[0].up.weight
    expected = (EagerReason.SHARED_PARAMETER, "parameter up.weight is used elsewhere too")
    assert found(modules) == {0: expected, 2: expected}


def test_a_module_that_runs_twice_leaves_both_calls_eager() -> None:
    module = Block()
    assert set(found([module, nn.Tanh(), module])) == {0, 2}


def test_a_parameter_used_outside_of_the_bank_leaves_its_site_eager() -> None:
    modules = [Block(), Block()]
    tied = nn.Linear(1, 1)
    tied.weight = modules[1].down.weight
    assert found(modules, other_params=tied.parameters()) == {
        1: (EagerReason.SHARED_PARAMETER, "parameter down.weight is used elsewhere too")
    }


def test_sharing_comes_before_hooks() -> None:
    module = Block()
    module.register_forward_hook(keep)
    other = nn.Linear(1, 1)
    other.weight = module.up.weight
    assert found([module], other_params=[other.weight])[0][0] is EagerReason.SHARED_PARAMETER
    assert torch.is_grad_enabled()
