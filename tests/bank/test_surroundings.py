# SPDX-License-Identifier: Apache-2.0
"""Calls that a replay cannot serve as eager would: their tensors, torch's modes, settings, writes."""

import contextlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from bank_pair import ROWS, WIDTH, Applies, Block, Pair, blocks, run_eager, variant
from notes import precision, told
from same_bits import assert_same_bits
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.backends import cudnn, mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megagraph.bank.bank import Bank
from megagraph.reasons import EagerReason

Run = Callable[[Tensor], Tensor]


class Named(torch.Tensor):
    """A subclass without a dispatch of its own."""


class Strict(TorchDispatchMode):
    """Refuses ops that fill a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "fill_" in str(func):
            raise RuntimeError("no op in place here")
        return func(*args, **(kwargs or {}))


class Doubles(TorchFunctionMode):
    """Changes what a function of torch's does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is nn.functional.linear else out


# After the first site a negative view is a tensor like any other, and a subclass is still one.
@pytest.mark.parametrize(("make", "num_eager"), [(lambda it: it.as_subclass(Named), 3), (torch._neg_view, 1)])
def test_tensors_that_are_not_plain_run_eager(device: str, make: Run, num_eager: int) -> None:
    pair = Pair(device, blocks()).capture(variant(training=False))
    hidden = make(pair.input())
    with torch.no_grad():
        out = pair.bank.run(hidden)
    assert type(out) is type(hidden)
    assert_same_bits(out, run_eager(pair.eager_layers, hidden), "output")
    assert pair.eager_calls() == {"SIGNATURE_CHANGED": num_eager}


def _tangent(run: Run, hidden: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(run(forward_ad.make_dual(hidden, torch.ones_like(hidden)))).tangent


@pytest.mark.parametrize("derive", [_tangent, lambda run, x: torch.func.grad(lambda it: run(it).sum())(x)])
def test_derivatives_of_other_modes_are_those_of_eager(pair: Pair, derive: Callable[..., Tensor]) -> None:
    hidden = pair.input()
    eager = derive(lambda given: run_eager(pair.eager_layers, given), hidden)
    assert_same_bits(derive(pair.bank.run, hidden), eager, "derivative")
    assert pair.eager_calls() == {"SIGNATURE_CHANGED": 3}


def test_a_slot_may_become_free_inside_a_mode_that_refuses_to_fill_it(device: str) -> None:
    pair = Pair(device, blocks()).capture(variant(training=False))
    with torch.no_grad():
        out = pair.forward(requires_grad=False).output
    with Strict():
        del out
    assert pair.evaluate("train") is None


def test_a_checkpoint_without_reentrance_around_a_micro_batch_runs_eager(pair: Pair) -> None:
    reasons, hidden = [], pair.input()

    def under_the_bank(given: Tensor) -> Tensor:
        with pair.bank.micro_batch("train") as reason:
            reasons.append(reason)
            return run_eager(pair.layers, given)

    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    for body, given in zip((under_the_bank, partial(run_eager, pair.eager_layers)), inputs, strict=True):
        checkpoint(body, given, use_reentrant=False).square().sum().backward()
    assert_same_bits(inputs[0].grad, inputs[1].grad, "gradient of the input")
    pair.check_state()
    assert reasons == [EagerReason.RECOMPUTING] * 2


CALLS: dict[str, Callable[[Bank], Any]] = {
    "begin": lambda bank: bank.begin(0, [], True),
    "end": lambda bank: bank.end(),
    "replay": lambda bank: bank.replay_all(torch.zeros(ROWS, WIDTH)),
    "release": lambda bank: bank.release(),  # Bug: the process died
}


@pytest.mark.parametrize("name", CALLS)
def test_who_calls_a_bank_while_another_thread_replays_it_gets_an_error(name: str) -> None:
    errors: list[str] = []
    meddles = False

    def meddle(hidden: Tensor) -> Tensor:
        """The host's replays run it again."""
        if meddles:
            with ThreadPoolExecutor(1) as threads:
                errors.append(str(threads.submit(CALLS[name], pair.bank).exception()))
        return hidden * 2

    pair, meddles = Pair("cpu", [Applies(meddle), Block()]).capture(), True
    pair.bank.run(pair.input().requires_grad_()).sum().backward()
    meddles = False
    assert re.match("another thread is replaying|a pass of this bank's graphs is run", errors[0])
    pair.zero_grads()
    assert pair.step() is None


# -- between a replayed forward and the end of its backward ------------------------------------------


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_a_gradient_waits_for_its_parameter_while_slots_are_leased_again(device: str, num_slots: int) -> None:
    pair = Pair(device, [nn.Linear(WIDTH, WIDTH, bias=False)], num_slots=num_slots)
    pair.capture(variant(), variant("first pass", training=False))

    def under_the_bank(hidden: Tensor) -> Tensor:
        with pair.bank.micro_batch("train" if torch.is_grad_enabled() else "first pass") as reason:
            if reason is not None:
                return run_eager(pair.layers, hidden)
            return pair.bank(hidden) if torch.is_grad_enabled() else pair.bank(hidden).clone()

    inputs = [pair.input() for _ in range(3)]
    for _ in range(2):  # into empty gradients, and on top of the former ones
        for body in (under_the_bank, lambda hidden: run_eager(pair.eager_layers, hidden)):
            first, last = body(inputs[0]), None
            middle = checkpoint(body, inputs[1].clone().requires_grad_(), use_reentrant=True)
            last = body(inputs[2])
            (first.square().sum() + middle.square().sum() + last.square().sum()).backward()
            del first, middle, last
        pair.check_state()
    assert pair.bank.all_free()


def _set(module: Any, name: str, value: Any) -> AbstractContextManager[None]:
    return told(lambda it: setattr(module, name, it), value, getattr(module, name))


PREFER_BLAS = torch.backends.cuda.preferred_blas_library
SETTINGS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "deterministic algorithms": lambda _: told(torch.use_deterministic_algorithms, False, True),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "autocast dtype": lambda device: torch.autocast(device, torch.float16, cache_enabled=False),
    "float32 matmul precision": lambda _: precision("high"),
    "cuDNN enabled": lambda _: _set(cudnn, "enabled", False),
    "cuDNN deterministic": lambda _: _set(cudnn, "deterministic", not cudnn.deterministic),
    "preferred BLAS library": lambda _: told(PREFER_BLAS, "cublaslt", PREFER_BLAS()),
    "plain attention": lambda _: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "default dtype": lambda _: told(torch.set_default_dtype, torch.float64, torch.float32),
    "filling of uninitialized memory": lambda _: _set(deterministic, "fill_uninitialized_memory", False),
    "fast path of torch's transformer layers": lambda _: told(mha.set_fastpath_enabled, False, True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_numeric_setting_that_changed_runs_eager_and_is_named(device: str, name: str) -> None:
    """A default device is none, nor a mode that changes anything."""
    if name == "preferred BLAS library" and not torch.backends.cuda.is_built():
        pytest.skip("torch without CUDA has one")
    pair = Pair(device, blocks())
    with torch.autocast(device, torch.bfloat16, enabled=name == "autocast dtype", cache_enabled=False):
        pair.capture()
        index, hidden = pair.bank.variants["train"], pair.input()
        assert pair.bank.changed_setting(index) == ""
        with SETTINGS[name](device):
            changed = pair.bank.changed_setting(index)
            assert changed == name or (name == "plain attention" and "attention" in changed)
            assert pair.forward(hidden).reason is EagerReason.NUMERICS_CHANGED
        with torch.device(device):
            assert pair.step() is None
        assert pair.eager_calls() == {"NUMERICS_CHANGED": 3}


@pytest.mark.parametrize("name", ["cuDNN deterministic", "autocast"])
def test_a_numeric_setting_that_changes_before_the_backward_is_an_error(pair: Pair, name: str) -> None:
    out, said = pair.bank.run(pair.input().requires_grad_()), rf"{name}\) changed between the forward and"
    with SETTINGS[name](pair.device), pytest.raises(RuntimeError, match=said):
        out.sum().backward()
    del out
    assert pair.step() is None


@pytest.mark.parametrize(
    ("last", "write", "is_error"),
    [
        (torch.tanh, lambda given, out: out.mul_(2), True),
        (torch.neg, lambda given, out: out.mul_(2), False),  # it does not save its output
        (torch.neg, lambda given, out: given.detach().mul_(2), True),
    ],
    ids=["a saved output", "an output", "an input"],
)
def test_a_write_is_the_error_that_it_is_in_eager(device: str, last: Run, write: Any, is_error: bool) -> None:
    pair = Pair(device, [Block(), nn.Sequential(Block(), Applies(last))]).capture()
    for run in (pair.bank.run, partial(run_eager, pair.eager_layers)):
        given = pair.input().requires_grad_() * 1.0
        out = run(given)
        write(given, out)
        with pytest.raises(RuntimeError, match="inplace op") if is_error else contextlib.nullcontext():
            out.sum().backward()
        del out
    assert pair.bank.all_free()


def test_a_write_between_two_sites_is_the_error_that_it_is_in_eager(device: str) -> None:
    pair = Pair(device, blocks(2)).capture()
    with pair.bank.micro_batch("train"):
        between = pair.bank.sites[0](pair.input().requires_grad_())
        out = pair.bank.sites[1](between)
    between.detach().zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


# -- where graphs hold collectives no rank runs eager alone inside of a step -------------------------


class Alone(RuntimeError):
    """Nobody else has come to run eager."""


def beside_others(*, are_alike: bool, **options: Any) -> tuple[Pair, list[tuple[int, int, str]]]:
    """Of one of several ranks, which find alike what keeps them eager or not; what they were asked."""
    asked: list[tuple[int, int, str]] = []

    def run_eager_alike(_number: int, *what: Any) -> None:
        asked.append(what)
        if not are_alike:
            raise Alone

    return Pair("cpu", blocks(), main_grad=True, run_eager_alike=run_eager_alike, **options).capture(), asked


def ends_unless(are_alike: bool) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if are_alike else pytest.raises(Alone)


hooks = partial(torch.autograd.graph.saved_tensors_hooks, lambda it: it, lambda it: it)


def stray_gradient(param: Any) -> AbstractContextManager[None]:
    return _set(param, "grad", torch.zeros_like(param))


@pytest.mark.parametrize("are_alike", [False, True])
@pytest.mark.parametrize(
    ("around", "why"),
    [
        (lambda _param: Strict(), "SIGNATURE_CHANGED: a dispatch mode"),
        (lambda _param: Doubles(), "SIGNATURE_CHANGED: a function mode"),
        (lambda _param: hooks(), "RECOMPUTING: saved-tensor hooks"),
        (lambda _param: precision("high"), "NUMERICS_CHANGED: float32 matmul precision"),
        (stray_gradient, "PARAMETERS_CHANGED"),
    ],
)
def test_what_is_around_a_micro_batch(around: Any, why: str, are_alike: bool) -> None:
    pair, asked = beside_others(are_alike=are_alike)
    reason = EagerReason[why.partition(":")[0]]
    with around(pair.params()[0]), ends_unless(are_alike):
        assert pair.forward().reason is reason
    assert asked == [(0, -1, why)] and pair.bank.slot_index == -1
    assert pair.eager_calls() == ({reason.name: 3} if are_alike else {})
    assert pair.forward().reason is None


@pytest.mark.parametrize("main_grad", [False, True])
def test_casts_that_autocast_keeps_are_none_of_a_capture(device: str, main_grad: bool) -> None:
    """Bug: it read those of its warm-up, and nobody added the gradients of such weights."""
    pair = Pair(device, [Block()], main_grad=main_grad)
    with torch.autocast(device, torch.bfloat16):
        pair.capture()
        assert torch.is_autocast_cache_enabled()
        assert [pair.step() for _ in range(2)] == [None] * 2


@pytest.mark.parametrize("are_alike", [False, True])
def test_a_tensor_of_another_form_that_a_site_is_given(are_alike: bool) -> None:
    """And hands on likewise."""
    pair, asked = beside_others(are_alike=are_alike)
    with ends_unless(are_alike):
        pair.bank.run(pair.input().t().contiguous().t())
    assert asked == [(0, site, "SIGNATURE_CHANGED") for site in range(3 if are_alike else 1)]
    assert pair.eager_calls() == ({"SIGNATURE_CHANGED": 3} if are_alike else {})
    assert pair.step() is None


def test_what_all_ranks_know_is_asked_of_nobody() -> None:
    """A second micro-batch in flight, and a site without graphs, whatever that is given."""
    pair, asked = beside_others(are_alike=False)
    first, second = pair.forward(), pair.forward()
    assert (first.reason, second.reason) == (None, EagerReason.NO_FREE_SLOT)
    second.backward()
    first.backward()
    pair.check_state()
    del first, second
    assert pair.step() is None and pair.eager_calls() == {"NO_FREE_SLOT": 3}
    assert asked == []
    pair, asked = beside_others(are_alike=False, steps=lambda layers: layers[1:])
    pair.bank.keep_eager(0, EagerReason.FOREIGN_HOOK)
    pair.capture(variant("again"))
    with pair.bank.micro_batch("again"):
        assert pair.bank.sites[0](pair.input().as_subclass(Named)) is NotImplemented
    assert asked == []


def test_before_a_step_a_rank_says_what_would_keep_it_eager() -> None:
    """All of them run that step eager then, and nobody asks inside of it."""
    pair, _asked = beside_others(are_alike=False)

    def reasons(look_at_grads: bool = False) -> list[EagerReason | None]:
        ask = pair.bank.reason_before_step
        return [ask(training=it, look_at_grads=look_at_grads) for it in (False, True)]

    assert reasons() == [None, None]
    with Strict():
        assert reasons() == [EagerReason.SIGNATURE_CHANGED] * 2
    with hooks():
        assert reasons() == [None, EagerReason.RECOMPUTING]
    with stray_gradient(pair.params()[0]):
        assert reasons() == [None, None]
        assert reasons(look_at_grads=True) == [None, EagerReason.PARAMETERS_CHANGED]
