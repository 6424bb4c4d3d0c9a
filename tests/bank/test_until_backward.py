# SPDX-License-Identifier: Apache-2.0
"""What happens between a replayed forward and the end of its backward: writes, settings, other leases."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from bank_pair import WIDTH, Applies, Block, Pair, blocks, run_eager, variant
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megagraph.decide.reasons import EagerReason


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_a_gradient_waits_for_its_parameter_while_slots_are_leased_again(device: str, num_slots: int) -> None:
    pair = Pair(device, [nn.Linear(WIDTH, WIDTH, bias=False)], num_slots=num_slots)
    pair.capture(variant(), variant("first pass", training=False))

    def under_the_bank(hidden: Tensor) -> Tensor:
        key = "train" if torch.is_grad_enabled() else "first pass"
        with pair.bank.micro_batch(key) as reason:
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


@contextmanager
def _told(tell: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    tell(value)
    try:
        yield
    finally:
        tell(before)


def _set(module: Any, name: str, value: Any) -> AbstractContextManager[None]:
    return _told(lambda it: setattr(module, name, it), value, getattr(module, name))


def _preferred_blas() -> AbstractContextManager[None]:
    prefer = torch.backends.cuda.preferred_blas_library
    return _told(prefer, "cublaslt", prefer())


SETTINGS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "deterministic algorithms": lambda _: _told(torch.use_deterministic_algorithms, False, True),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "float32 matmul precision": lambda _: _told(torch.set_float32_matmul_precision, "high", "highest"),
    "cuDNN enabled": lambda _: _set(torch.backends.cudnn, "enabled", False),
    "preferred BLAS library": lambda _: _preferred_blas(),
    "plain attention": lambda _: torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.FLASH_ATTENTION
    ),
    "default dtype": lambda _: _told(torch.set_default_dtype, torch.float64, torch.float32),
    "filling of uninitialized memory": lambda _: _set(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "fast path of torch's transformer layers": lambda _: _told(
        torch.backends.mha.set_fastpath_enabled, False, True
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_numeric_setting_that_changed_runs_eager_and_is_named(device: str, name: str) -> None:
    if name == "preferred BLAS library" and not torch.backends.cuda.is_built():
        pytest.skip("torch without CUDA has one")
    pair = Pair(device, blocks()).capture()
    index, hidden = pair.bank.variants["train"], pair.input()
    assert pair.bank.changed_setting(index) == ""
    with SETTINGS[name](device):
        changed = pair.bank.changed_setting(index)
        assert changed == name or (name == "plain attention" and "attention" in changed)
        assert pair.forward(hidden).reason is EagerReason.NUMERICS_CHANGED
    assert pair.step() is None
    assert pair.eager_calls() == {"NUMERICS_CHANGED": 3}


@pytest.mark.parametrize("name", ["cuDNN deterministic", "autocast"])
def test_a_numeric_setting_that_changes_before_the_backward_is_an_error(device: str, name: str) -> None:
    pair = Pair(device, blocks()).capture()
    with pair.bank.micro_batch("train"):
        out = pair.bank(pair.input().requires_grad_())
    cudnn = torch.backends.cudnn
    is_deterministic = _set(cudnn, "deterministic", not cudnn.deterministic)
    other = is_deterministic if name == "cuDNN deterministic" else SETTINGS[name](device)
    with other, pytest.raises(RuntimeError, match=rf"{name}\) changed between the forward and"):
        out.sum().backward()
    del out
    assert pair.step() is None


def _both_backwards(pair: Pair, write: Callable[[Tensor, Tensor], object]) -> list[str]:
    """What goes wrong in the backward, under the bank and eager, after a write to input or output."""
    hidden, errors = pair.input(), []
    for is_ours in (True, False):
        given = hidden.clone().requires_grad_() * 1.0
        if is_ours:
            with pair.bank.micro_batch("train") as reason:
                assert reason is None
                out = pair.bank(given)
        else:
            out = run_eager(pair.eager_layers, given)
        write(given, out)
        try:
            out.sum().backward()
            errors.append("")
        except RuntimeError as error:
            errors.append("inplace operation" if "inplace operation" in str(error) else str(error))
        del out
    return errors


@pytest.mark.parametrize(
    ("last", "write", "error"),
    [
        (torch.tanh, lambda given, out: out.mul_(2), "inplace operation"),
        (torch.neg, lambda given, out: out.mul_(2), ""),  # it does not save its output
        (torch.neg, lambda given, out: given.detach().mul_(2), "inplace operation"),
    ],
    ids=["a saved output", "an output", "an input"],
)
def test_a_write_is_the_error_that_it_is_in_eager(
    device: str, last: Callable[[Tensor], Tensor], write: Callable[[Tensor, Tensor], object], error: str
) -> None:
    pair = Pair(device, [Block(), nn.Sequential(Block(), Applies(last))]).capture()
    assert _both_backwards(pair, write) == [error, error]
    assert pair.bank.all_free()


def test_a_write_between_two_sites_is_the_error_that_it_is_in_eager(device: str) -> None:
    pair = Pair(device, blocks(2)).capture()
    hidden = pair.input().requires_grad_()
    with pair.bank.micro_batch("train"):
        between = pair.bank.sites[0](hidden)
        out = pair.bank.sites[1](between)
    between.detach().zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()
