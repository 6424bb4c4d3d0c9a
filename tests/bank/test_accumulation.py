# SPDX-License-Identifier: Apache-2.0
"""Every gradient of a captured backward is added once, and all of it, as eager adds it."""

from typing import Any

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


def test_gradients_that_a_fused_layer_has_added_are_not_added_again(device: str) -> None:
    pair = Pair(device, [FusedLinear(), Block(), FusedLinear()], main_grad=True).capture()
    for param in (param for layer in pair.layers for param in layer.parameters()):
        assert not param.grad_added_to_main_grad, "capture left the flag set"  # type: ignore[attr-defined]
    for _ in range(4):
        assert pair.step() is None
    assert pair.bank.counters()["replays"] == 12


def test_gradients_of_a_fused_layer_that_zeroes_them_out_are_added_after_all(device: str) -> None:
    """Megatron's hook adds what such a layer hands on, although it has added the gradient itself."""
    pair = Pair(device, [FusedLinear(zeroes_out=True), Block(), FusedLinear()], main_grad=True).capture()
    for _ in range(4):
        assert pair.step() is None
    assert pair.bank.counters()["replays"] == 12
    added, alone = (pair.layers[index].get_parameter("weight").main_grad.mean() for index in (0, 2))
    assert added > 3 * FILLER > alone


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
    (failure,) = pair.bank.failures
    assert (failure.index, failure.reason) == (1, EagerReason.SHARED_PARAMETER)
    assert "gets its gradient in parts" in failure.detail
    for _ in range(3):  # each on top of the one before
        assert pair.step() is None
        assert pair.step(pair.input(4), "even") is None
    assert pair.eager_calls() == {"SHARED_PARAMETER": 6}
    assert pair.bank.counters()["replays"] == 12


def test_two_uses_in_one_backward_pass_are_one_part(device: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            return torch.tanh(hidden @ self.weight) @ self.weight

    pair = Pair(device, [Twice(), Block()]).capture()
    assert pair.bank.failures == []
    for _ in range(3):
        assert pair.step() is None
    assert pair.bank.counters()["replays"] == 6


def test_a_gradient_that_comes_in_several_parts_is_added_up_in_main_grad(device: str) -> None:
    pair = Pair(device, [Block(), PartlyRecomputed(), Block()], main_grad=True).capture()
    assert pair.bank.failures == []
    for _ in range(3):
        assert pair.step() is None
    assert pair.bank.counters()["replays"] == 9


def test_a_gradient_beside_main_grad_is_added_as_in_eager(device: str) -> None:
    """Megatron's FP32 optimizer leaves `main_grad` itself there, until somebody calls `zero_grad()`."""
    pair = Pair(device, [Block(), Block()], main_grad=True).capture()
    for stray in ("main_grad", "another", None):
        for param in nn.ModuleList([*pair.layers, *pair.eager_layers]).parameters():
            if stray is not None:
                param.grad = param.main_grad if stray == "main_grad" else torch.ones_like(param)
        assert pair.step() == (None if stray is None else EagerReason.PARAMETERS_CHANGED)
        assert pair.step() is None, "the hook of eager's backward takes it away"
