# SPDX-License-Identifier: Apache-2.0
"""What a micro-batch carries through the block: rows of no document, there and back; a mask."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from megatron_rig import CAPACITY, LAYERS, Micro, Pair, Step, forward, grads
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph.demo.trainer import Trainer
from megagraph.packs.ops import TailConvention

MICRO = Micro(lengths=(9, 20), tail=7)
END = sum(MICRO.lengths)


def _through_the_block(trainer: Trainer, filler: float) -> tuple[Tensor, Step]:
    """One pass whose gradient is `filler` past the pack's end; what the block gave and what it left."""
    outputs: list[Tensor] = []
    handle = trainer.chunk.decoder.register_forward_hook(lambda _module, _args, out: outputs.append(out))
    trainer.zero_grad()
    losses, _ = forward(trainer.model, MICRO, trainer.device)
    (out,) = outputs
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    grad[END:] = filler
    torch.autograd.backward(out, grad)
    handle.remove()
    left = Step(losses=[losses.detach()], grads=grads(trainer.chunk))
    return out.detach().clone(), left


def test_rows_past_the_packs_end_leave_as_zeros_and_no_gradient_of_theirs_comes_back(pair: Pair) -> None:
    for trainer in pair.both:
        with torch.no_grad():
            # What was zero before the last norm is not zero after it.
            trainer.chunk.decoder.final_layernorm.bias.fill_(0.5)
            for layer in trainer.chunk.decoder.layers:
                layer.mlp.linear_fc2.bias.fill_(0.25)
        trainer.optimizer.reload_model_params()
    pair.step(MICRO, times=2)
    found = []
    for filler in (0.0, float("nan")):
        found += pair.each(partial(_through_the_block, filler=filler))
    for out, left in found:
        assert out.shape[0] == MICRO.physical
        assert out[:END].any() and torch.equal(out[END:], torch.zeros_like(out[END:]))
        assert torch.equal(out, found[0][0])
        assert_same_bits(left, found[0][1])
    assert pair.report()["replays"] == (1 + 2) * LAYERS


class _AddToGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] + 1


class _WithPenalty(nn.Module):
    """A norm with a loss of its own, which every row adds to."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.norm(_AddToGradient.apply(hidden_states))
        return out


@pytest.mark.parametrize("tail", TailConvention)
@pytest.mark.parametrize("padded", [None, (12, 24)], ids=["plain", "padded"])
def test_no_gradient_that_a_layer_makes_past_the_packs_end_comes_back(
    tail: TailConvention, padded: tuple[int, ...] | None
) -> None:
    """Bug: with `empty-dummy` graphs took the end of the buffer for the pack's."""
    pair = Pair(plugin={"tail": tail, "capacities": (CAPACITY.replace(num_seqs=3),)})
    for trainer in pair.both:
        layer = trainer.chunk.decoder.layers[0]
        layer.input_layernorm = _WithPenalty(layer.input_layernorm)
    pair.step(dataclasses.replace(MICRO, padded=padded), times=3)
    assert pair.report()["replays"] == 2 * LAYERS
