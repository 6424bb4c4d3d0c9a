# SPDX-License-Identifier: Apache-2.0
"""Every gradient of a captured backward is added once, and all of it, as eager adds it."""

from typing import Any

import pytest
import torch
from bank_pair import WIDTH, Block, Pair, variant
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megagraph.decide.reasons import EagerReason

FILLER = 7.0  # of the gradients that a fused layer hands on; whoever adds one shows


class FusedLinear(nn.Module):
    """Adds its weight's gradient to `main_grad` by itself, as Megatron's fused accumulation does."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor, owner: "FusedLinear") -> Tensor:
            ctx.save_for_backward(hidden, weight)
            ctx.owner = owner
            return hidden @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
            hidden, weight = ctx.saved_tensors
            param: Any = ctx.owner.weight
            param.main_grad.add_(grad.t() @ hidden)
            param.grad_added_to_main_grad = True
            if ctx.owner.zeroes_out:
                param.zero_out_wgrad = True
            return grad @ weight, torch.full_like(weight, FILLER), None

    def __init__(self, *, zeroes_out: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.zeroes_out = zeroes_out

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.Function.apply(hidden, self.weight, self)
        return out


@pytest.mark.parametrize("zeroes_out", [False, True])
def test_gradients_that_a_fused_layer_has_added_are_not_added_again_unless_it_zeroes_them_out(
    device: str, zeroes_out: bool
) -> None:
    """Megatron's hook adds what such a layer hands on, although it has added the gradient itself."""
    layers = [FusedLinear(zeroes_out=zeroes_out), Block(), FusedLinear()]
    pair = Pair(device, layers, main_grad=True).capture()
    assert not any(param.grad_added_to_main_grad for param in pair.params()), "capture left the flag set"
    pair.replay_steps(4)
    added, alone = (layer.weight.main_grad.mean() for layer in pair.layers[::2])
    assert (added > 3 * FILLER) == zeroes_out and alone < FILLER


class PartlyRecomputed(nn.Module):
    """Uses its weight outside of a re-entrant checkpoint and inside: the gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def _inner(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden @ self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        inner: Tensor = checkpoint(self._inner, hidden, use_reentrant=True, preserve_rng_state=False)
        return inner + nn.functional.linear(inner, self.weight)


def test_a_gradient_that_comes_in_several_parts_leaves_its_layer_eager(device: str) -> None:
    """Without `main_grad`, eager adds part by part to an earlier gradient, and a graph added their sum."""
    pair = Pair(device, [Block(), PartlyRecomputed(), Block()]).capture(variant(), variant("even", rows=4))
    assert "gets its gradient in parts" in pair.failure(1, EagerReason.SHARED_PARAMETER)
    for _ in range(3):  # each on top of the one before
        assert pair.step() is None
        assert pair.step(pair.input(4), "even") is None
    assert pair.eager_calls() == {"SHARED_PARAMETER": 6}
    assert pair.bank.counters()["replays"] == 12


class Twice(PartlyRecomputed):
    """Uses its weight twice in one backward pass, which is one part."""

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(self._inner(hidden), self.weight)


@pytest.mark.parametrize(("kind", "main_grad"), [(Twice, False), (PartlyRecomputed, True)])
def test_one_part_and_several_in_main_grad_are_added_up(
    device: str, kind: type[nn.Module], main_grad: bool
) -> None:
    pair = Pair(device, [Block(), kind(), Block()], main_grad=main_grad).capture()
    assert pair.bank.failures == []
    pair.replay_steps(3)


def test_a_gradient_beside_main_grad_is_added_as_in_eager(device: str) -> None:
    """Megatron's FP32 optimizer leaves `main_grad` itself there, until somebody calls `zero_grad()`."""
    pair = Pair(device, [Block(), Block()], main_grad=True).capture()
    for stray in ("main_grad", "another", None):
        for param in nn.ModuleList([*pair.layers, *pair.eager_layers]).parameters():
            if stray is not None:
                param.grad = param.main_grad if stray == "main_grad" else torch.ones_like(param)
        assert pair.step() == (None if stray is None else EagerReason.PARAMETERS_CHANGED)
        assert pair.step() is None, "the hook of eager's backward takes it away"


class Borrowing(nn.Module):
    """Uses the weight of another layer, through a list: no module of its own has it."""

    def __init__(self, other: Block) -> None:
        super().__init__()
        self.own, self.borrowed = nn.Linear(WIDTH, WIDTH), [other]

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.own(nn.functional.linear(hidden, self.borrowed[0].up.weight[:WIDTH]))


@pytest.mark.parametrize("main_grad", [False, True])
def test_a_parameter_that_a_layer_borrows_leaves_it_and_the_owner_eager(device: str, main_grad: bool) -> None:
    """Bug: the warm-up left the gradient of its random input there, and replays lost that of the pack."""
    lender = Block()
    pair = Pair(device, [lender, Block(), Borrowing(lender)], main_grad=main_grad)
    before = [param.clone() for param in pair.params()]
    pair.capture()
    assert all(param.grad is None for param in pair.params())
    assert [failure.index for failure in pair.bank.failures] == [0, 2]
    assert {failure.reason for failure in pair.bank.failures} == {EagerReason.SHARED_PARAMETER}
    lent, borrowed = (failure.detail for failure in pair.bank.failures)
    assert "is used by" in lent and "that none of its modules has" in borrowed
    pair.replay_steps(3, SHARED_PARAMETER=6)
    assert all(map(torch.equal, before, pair.params()))
