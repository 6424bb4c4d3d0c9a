# SPDX-License-Identifier: Apache-2.0
"""A model that is called again while one of its micro-batches runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_rig import Micro, Pair
from torch import Tensor

from megagraph.config import GraphConfig
from megagraph.demo.trainer import Trainer

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="shows what the host decides, with Megatron on the CPU"
    ),
]
MICRO = Micro(lengths=(9, 20, 11))
PROMPT = 5


def _call_inside(trainer: Trainer, call: Callable[[Any], Tensor]) -> list[Tensor]:
    """From now on each embedding of the model calls the model; what it answers is collected."""
    answers: list[Tensor] = []

    def inside(*_: object) -> None:
        handle.remove()
        with torch.no_grad():
            answers.append(call(trainer.chunk))
        register()

    def register() -> None:
        nonlocal handle
        handle = trainer.chunk.embedding.register_forward_hook(inside)

    handle: Any = None
    register()
    return answers


def _infer(chunk: Any) -> Tensor:
    from megatron.core.inference.contexts import StaticInferenceContext

    tokens = torch.arange(PROMPT)[None]
    logits: Tensor = chunk(
        input_ids=tokens,
        position_ids=tokens,
        attention_mask=None,
        inference_context=StaticInferenceContext(1, 64),
    )
    return logits


def test_inference_inside_a_replaying_step_is_none_of_its_micro_batches(
    install: Callable[..., GraphConfig],
) -> None:
    install()
    pair = Pair()
    pair.step(MICRO, times=4)
    assert pair.report()["replays"] > 0
    eager, graphed = (_call_inside(trainer, _infer) for trainer in pair.both)
    counted = pair.report()
    pair.step(MICRO)
    assert [logits.shape[:2] for logits in graphed] == [(1, PROMPT)]
    assert torch.equal(graphed[0], eager[0])
    after = pair.report()
    assert (after["eager"], after["replays"]) == (counted["eager"], counted["replays"] + counted["layers"])


def test_a_call_without_input_inside_a_step_says_so_and_the_step_goes_on(
    install: Callable[..., GraphConfig],
) -> None:
    install()
    pair = Pair()
    pair.step(MICRO, times=4)

    def nothing(chunk: Any) -> Tensor:
        with pytest.raises(TypeError, match="NoneType"):
            chunk(input_ids=None, position_ids=None, attention_mask=None)
        return torch.zeros(())

    for trainer in pair.both:
        _call_inside(trainer, nothing)
    pair.step(MICRO)
