# SPDX-License-Identifier: Apache-2.0
"""What happens between a replayed forward and the end of its backward: writes, settings, other leases."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from bank_pair import WIDTH, Block, Pair, blocks, run_eager, variant
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
    assert pair.bank.core.all_free()


@contextmanager
def _set(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _preferred_blas() -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "cuDNN enabled": lambda: _set(torch.backends.cudnn, "enabled", False),
    "preferred BLAS library": _preferred_blas,
    "plain attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
    "default dtype": _default_dtype,
    "filling of uninitialized memory": lambda: _set(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "fast path of torch's transformer layers": _without_fast_path,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_numeric_setting_that_changed_runs_eager(device: str, name: str) -> None:
    if name == "preferred BLAS library" and not torch.backends.cuda.is_built():
        pytest.skip("torch without CUDA has one")
    pair = Pair(device, blocks()).capture()
    with SETTINGS[name]():
        changed = pair.bank.core.changed_setting(0)
        assert changed == name or (name == "plain attention" and "attention" in changed)
        with pair.bank.micro_batch("train") as reason:
            assert reason is EagerReason.NUMERICS_CHANGED
    assert pair.step() is None


@pytest.mark.parametrize("name", ["cuDNN deterministic", "autocast"])
def test_a_numeric_setting_that_changes_before_the_backward_is_an_error(device: str, name: str) -> None:
    pair = Pair(device, blocks()).capture()
    with pair.bank.micro_batch("train"):
        out = pair.bank(pair.input().requires_grad_())
    is_deterministic = torch.backends.cudnn.deterministic
    other = {
        "cuDNN deterministic": _set(torch.backends.cudnn, "deterministic", not is_deterministic),
        "autocast": torch.autocast(device, torch.bfloat16),
    }[name]
    with other, pytest.raises(RuntimeError, match=rf"{name}\) changed between the forward and"):
        out.sum().backward()
    del out
    assert pair.step() is None


class Ends(nn.Module):
    """A block that ends in `last`."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self._last = Block(), last

    def forward(self, hidden: Tensor) -> Tensor:
        return self._last(self.block(hidden))


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


@pytest.mark.parametrize("last", [torch.tanh, torch.neg], ids=["saves its output", "does not"])
def test_a_write_into_an_output_is_the_error_that_it_is_in_eager(
    device: str, last: Callable[[Tensor], Tensor]
) -> None:
    pair = Pair(device, [Block(), Ends(last)]).capture()
    ours, eager = _both_backwards(pair, lambda given, out: out.mul_(2))
    assert ours == eager == ("inplace operation" if last is torch.tanh else "")
    assert pair.bank.core.all_free()


def test_a_write_into_an_input_is_the_error_that_it_is_in_eager(device: str) -> None:
    pair = Pair(device, blocks(2)).capture()
    ours, eager = _both_backwards(pair, lambda given, out: given.detach().mul_(2))
    assert ours == eager == "inplace operation"


def test_a_write_between_two_sites_is_the_error_that_it_is_in_eager(device: str) -> None:
    pair = Pair(device, blocks(2)).capture()
    hidden = pair.input().requires_grad_()
    with pair.bank.micro_batch("train"):
        between = pair.bank.sites[0](hidden)
        out = pair.bank.sites[1](between)
    between.detach().zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()
