# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation modes: layers are captured in those that they are found in, each set of its own."""

from typing import Any

import megatron_rig as rig
import pytest
import torch
from host_rig import FULL, frozen_model
from same_bits import assert_same_bits
from torch import Tensor, nn

import megagraph
from megagraph.demo.trainer import Trainer


class Doubles(nn.Module):
    """An MLP whose output is twice as large in evaluation mode."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.inner(*args, **kwargs)
        return (out if self.training else out * 2), bias


class Merges(nn.Module):
    """An MLP that adds to its weight as it leaves training mode, and takes that off again: never the same."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.is_merged = False

    def train(self, mode: bool = True) -> "Merges":
        super().train(mode)
        if mode == self.is_merged:
            sign = -1 if mode else 1
            self.inner.linear_fc1.weight.data += sign * 0.1
            self.is_merged = not mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.inner(*args, **kwargs)
        return (out * 3 if self.is_merged else out), bias


def _second_mlp(trainer: Trainer) -> Any:
    return trainer.chunk.decoder.layers[1].mlp


def test_no_capture_calls_train_whose_side_effects_may_change_weights() -> None:
    """Bug: to capture another mode, `train()` was called, and only the flags were put back afterwards."""
    pair = rig.Pair(prepare=rig.around_mlps(Merges))
    for _ in range(3):
        pair.step(rig.ONE, rig.TWO)
        pair.evaluate(rig.OTHER)
        weights = [_second_mlp(trainer).inner.linear_fc1.weight for trainer in pair.both]
        assert torch.equal(*weights)
    assert pair.report()["eager"] == {"WARMING_UP": (2 + 1) * rig.LAYERS}
    assert pair.report()["replays"] == 2 * (2 + 1) * rig.LAYERS
    assert pair.report()["graphs"] == (2 + 1) * rig.LAYERS


def _with_reference_passes(trainer: Trainer, micros: list[rig.Micro]) -> rig.Step:
    """A step whose forward function also runs the model in evaluation mode, without gradients."""
    passes: list[Tensor] = []

    def forward_step(data: Any, chunk: Any) -> Any:
        micro = next(data)
        chunk.eval()
        with torch.no_grad():
            losses, _ = rig.forward(chunk, micro, trainer.device)
            passes.append(losses.clone())
            del losses
        chunk.train()
        return rig.forward(chunk, micro, trainer.device)

    trainer.model.zero_grad_buffer()
    rig.run_schedule(trainer.model, forward_step, micros, len(micros))
    return rig.Step(losses=passes, grads=rig.grads(trainer.chunk))


def test_passes_in_modes_that_no_step_begins_in_stay_eager_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = rig.Pair(prepare=rig.around_mlps(Doubles))
    for _ in range(6):
        assert_same_bits(*pair.each(lambda trainer: _with_reference_passes(trainer, [rig.ONE, rig.TWO])))
    assert pair.report()["eager"] == {"WARMING_UP": (2 + 6 * 2) * rig.LAYERS}
    assert pair.report()["replays"] == 5 * 2 * rig.LAYERS
    said = [line for line in caplog.messages if "in steps that begin in another state" in line]
    assert said == [
        "GPTModel #2: micro-batches without gradients stay eager in steps that begin in another state: "
        "layers are captured between steps, in the state they have there (train() or eval(), adapters, hooks)"
    ]


@pytest.mark.parametrize(
    "contexts", [(torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)]
)
def test_nothing_is_captured_in_inference_mode_nor_replayed(contexts: Any, install: rig.Install) -> None:
    """Its tensors could not be written any more outside of it; buffers of graphs are none.

    Bug: a model whose first call was in it was never captured, for a counter that it had made then.
    """
    install()
    model, called = frozen_model(seed=3)
    device = next(model.parameters()).device
    found = []
    for context in contexts * 2:
        with context():
            found.append(rig.forward(called, FULL, device)[0].clone())
    assert all(torch.equal(found[0], other) for other in found)
    (report,) = megagraph.reports()
    assert report["eager"] == {"WARMING_UP": rig.LAYERS, "SIGNATURE_CHANGED": 2 * rig.LAYERS}
    assert report["replays"] == rig.LAYERS
