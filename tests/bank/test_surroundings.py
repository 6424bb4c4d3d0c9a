# SPDX-License-Identifier: Apache-2.0
"""Calls that a replay cannot serve as eager would: their tensors, torch's modes, writes in between."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bank_pair import ROWS, WIDTH, Applies, Block, CountsOps, Pair, blocks, run_eager, variant
from same_bits import assert_same_bits
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from megagraph.bank.bank import Bank
from megagraph.decide.reasons import EagerReason


class Named(torch.Tensor):
    """A subclass without a dispatch of its own."""


# After the first site a negative view is a tensor like any other, and a subclass is still one.
@pytest.mark.parametrize(
    ("make", "num_eager"), [(lambda hidden: hidden.as_subclass(Named), 3), (torch._neg_view, 1)]
)
def test_tensors_that_are_not_plain_run_eager(
    device: str, make: Callable[[Tensor], Tensor], num_eager: int
) -> None:
    pair = Pair(device, blocks()).capture(variant(training=False))
    hidden = make(pair.input())
    with torch.no_grad(), pair.bank.micro_batch("train"):
        out = pair.bank(hidden)
    assert type(out) is type(hidden)
    assert_same_bits(out, run_eager(pair.eager_layers, hidden), "output")
    assert pair.eager_calls() == {"SIGNATURE_CHANGED": num_eager}


def test_a_fake_tensor_runs_eager(device: str) -> None:
    from torch._subclasses import FakeTensorMode

    pair = Pair(device, blocks()).capture(variant(training=False))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        hidden = mode.from_tensor(pair.input())
    with torch.no_grad(), pair.bank.micro_batch("train") as reason:
        assert reason is None
        assert pair.bank.replay_all(hidden) is NotImplemented
        assert pair.bank.sites[0](hidden) is NotImplemented
    assert pair.eager_calls() == {"SIGNATURE_CHANGED": 1}


def _tangent(run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(hidden, torch.ones_like(hidden))
        found: Tensor = forward_ad.unpack_dual(run(dual)).tangent
        return found


def _transformed(run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(lambda given: run(given).sum())(hidden)
    return found


@pytest.mark.parametrize("derivative", [_tangent, _transformed])
def test_derivatives_of_other_modes_are_those_of_eager(
    pair: Pair, derivative: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> None:
    def under_the_bank(given: Tensor) -> Tensor:
        with pair.bank.micro_batch("train"):
            return pair.bank(given)

    hidden = pair.input()
    eager = derivative(lambda given: run_eager(pair.eager_layers, given), hidden)
    assert_same_bits(derivative(under_the_bank, hidden), eager, "derivative")
    assert pair.eager_calls() == {"SIGNATURE_CHANGED": 3}


def test_a_dispatch_mode_sees_every_op(pair: Pair) -> None:
    with CountsOps() as ours:
        assert pair.forward().reason is EagerReason.SIGNATURE_CHANGED
    assert ours.ops > 3 * len(pair.layers)
    assert pair.step() is None


def test_a_slot_may_become_free_inside_a_mode_that_refuses_to_fill_it(device: str) -> None:
    pair = Pair(device, blocks()).capture(variant(training=False))
    with torch.no_grad():
        out = pair.forward(requires_grad=False).output
    with CountsOps(is_strict=True):
        del out
    with torch.no_grad():
        assert pair.forward(requires_grad=False).reason is None


# -- recompute by saved-tensor hooks -----------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_checkpoint_without_reentrance_around_a_micro_batch_runs_eager(device: str, num_slots: int) -> None:
    pair = Pair(device, blocks(), num_slots=num_slots).capture()
    reasons = []

    def under_the_bank(hidden: Tensor) -> Tensor:
        with pair.bank.micro_batch("train") as reason:
            reasons.append(reason)
            out = pair.bank(hidden) if reason is None else run_eager(pair.layers, hidden)
        return torch.tanh(out)

    def eager(hidden: Tensor) -> Tensor:
        return torch.tanh(run_eager(pair.eager_layers, hidden))

    hidden = pair.input()
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    for body, given in zip((under_the_bank, eager), inputs, strict=True):
        checkpoint(body, given, use_reentrant=False).square().sum().backward()
    assert_same_bits(inputs[0].grad, inputs[1].grad, "gradient of the input")
    pair.check_state()
    assert reasons == [EagerReason.RECOMPUTING] * 2


def test_hooks_inside_a_micro_batch_are_seen_by_each_site(pair: Pair) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with pair.bank.micro_batch("train") as reason:
        assert reason is None
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            pair.bank(pair.input()).sum().backward()
    assert kept
    assert pair.eager_calls() == {"RECOMPUTING": 3}


@pytest.mark.parametrize(
    "call",
    [
        lambda bank: bank.begin(0, [], True),
        lambda bank: bank.end(),
        lambda bank: bank.replay_all(torch.zeros(ROWS, WIDTH)),
    ],
    ids=["begin", "end", "replay"],
)
def test_who_calls_a_bank_while_another_thread_replays_it_gets_an_error(call: Callable[[Bank], Any]) -> None:
    errors: list[str] = []
    meddles = False

    def calls() -> None:
        try:
            call(pair.bank)
        except RuntimeError as error:
            errors.append(str(error))

    def meddle(hidden: Tensor) -> Tensor:
        """The host's replays run it again."""
        if meddles:
            thread = threading.Thread(target=calls)
            thread.start()
            thread.join()
        return hidden * 2

    pair = Pair("cpu", [Applies(meddle), Block()]).capture()
    meddles = True
    with pair.bank.micro_batch("train"):
        out = pair.bank(pair.input().requires_grad_())
    out.sum().backward()
    meddles = False
    del out
    assert errors and "another thread is replaying this bank" in errors[0]
    for layer in pair.layers:
        layer.zero_grad()
    assert pair.step() is None
