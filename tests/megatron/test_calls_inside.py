# SPDX-License-Identifier: Apache-2.0
"""A model that is called again while one of its micro-batches runs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from host_rig import frozen_model
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron_rig import LAYERS, OPTIONS, Install, Micro, Pair, forward, grads, ran, run_schedule, step
from same_bits import assert_same_bits
from torch import Tensor

import megagraph
from megagraph.demo.trainer import Trainer

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="shows what the host decides, with Megatron on the CPU"
)
MICRO = Micro(lengths=(9, 20, 11))
PROMPT = 5
OTHER = Micro(lengths=(5, 30), seed=1)


def _call_inside(trainer: Trainer, call: Callable[[Any], Tensor]) -> list[Tensor]:
    """From now on each embedding of the model calls the model; what it answers is collected."""
    answers: list[Tensor] = []
    is_inside = [False]

    def inside(*_: object) -> None:
        if not is_inside[0]:
            is_inside[0] = True
            with torch.no_grad():
                answers.append(call(trainer.chunk))
            is_inside[0] = False

    trainer.chunk.embedding.register_forward_hook(inside)
    return answers


@pytest.mark.parametrize("is_flagged", [False, True])
def test_inference_inside_a_replaying_step_is_none_of_its_micro_batches(pair: Pair, is_flagged: bool) -> None:
    """Bug: what Megatron's flag says since 0.19 was not known, and without a context a call raised."""
    mode = getattr(gpt_model, "InferenceMode", None)
    if is_flagged and mode is None:
        pytest.skip("this release has no flag of inference")

    def infer(chunk: Any) -> Tensor:
        tokens = torch.arange(PROMPT)[None]
        if not is_flagged:
            return chunk(tokens, tokens, None, inference_context=StaticInferenceContext(1, 64))
        pack = Micro(lengths=(PROMPT,)).given(tokens.device)["packed_seq_params"]
        with mode.active():
            return chunk(tokens, tokens, None, packed_seq_params=pack, runtime_gather_output=True)

    pair.step(MICRO, times=4)
    assert pair.report()["replays"] > 0
    eager, graphed = (_call_inside(trainer, infer) for trainer in pair.both)
    counted = pair.report()
    pair.step(MICRO)
    assert [logits.shape[:2] for logits in graphed] == [(1, PROMPT)]
    assert_same_bits(graphed[0], eager[0])
    after = pair.report()
    assert (after["eager"], after["replays"]) == (counted["eager"], counted["replays"] + counted["layers"])


class Looped(TransformerBlock):
    """Runs its layers twice."""

    def forward(self, hidden_states: Any, attention_mask: Any, **given: Any) -> Any:
        once = super().forward(hidden_states, attention_mask, **given)
        return super().forward(once, attention_mask, **given)


CALLS, REPEATED, PENALTY = (
    "several of its calls in one backward pass",
    "layers that run several times in one call",
    "gradients that reach parameters of its layers in another way, as of a penalty on weights,",
)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("ddp", [{}, {"overlap_grad_reduce": True}], ids=str)
@pytest.mark.parametrize("way", [CALLS, REPEATED, PENALTY], ids=["calls", "loops", "penalty"])
def test_parameters_with_several_gradients_leave_their_model_eager(way: str, ddp: Any, is_late: bool) -> None:
    """Bug: each graph added its part and told DDP before all was there: other bits, or an error of DDP's."""
    pair = Pair(ddp=ddp)

    def train(trainer: Any) -> dict[str, Tensor]:
        def forward_step(data: Iterator[Micro], chunk: Any) -> tuple[Tensor, Any]:
            first, *rest = (forward(chunk, next(data), trainer.device)[0] for _ in range(1 + (way == CALLS)))
            if way == PENALTY:
                rest = [param.square() for param in trainer.chunk.parameters()]
            return first, lambda out: (out.mean() + 0.1 * sum(it.mean() for it in rest), {})

        trainer.zero_grad()
        run_schedule(trainer.model, forward_step, [MICRO, OTHER] * 2, 2)
        return grads(trainer.chunk)

    if is_late:
        pair.step(MICRO, OTHER, times=4)
    for trainer in pair.both:
        if way == REPEATED:
            trainer.chunk.decoder.__class__ = Looped
    if is_late and way != REPEATED:  # one step has other roundings, unless DDP would be told too early
        told = pytest.raises(RuntimeError, match="brings one of its parameters another gradient")
        with told if ddp else contextlib.nullcontext():
            train(pair.graphed)
    for _ in range(3):
        assert_same_bits(*pair.each(train))
    report = pair.report()
    assert way in report["failures"][0]
    if not is_late:
        assert report["replays"] == 0 and report["eager"].keys() == {"WARMING_UP", "SCOPE_UNSUPPORTED"}


def test_a_call_without_input_inside_a_step_says_so_and_the_step_goes_on(pair: Pair) -> None:
    pair.step(MICRO, times=4)

    def nothing(chunk: Any) -> Tensor:
        with pytest.raises(TypeError, match="NoneType"):
            chunk(input_ids=None, position_ids=None, attention_mask=None)
        return torch.zeros(())

    pair.each(lambda trainer: _call_inside(trainer, nothing))
    pair.step(MICRO)


def test_a_micro_batch_inside_another_leaves_the_outer_one_its_own(pair: Pair) -> None:
    pair.step(MICRO, times=2)
    eager, graphed = (
        _call_inside(it, lambda chunk: forward(chunk, OTHER, torch.device("cpu"))[0]) for it in pair.both
    )
    counted = pair.report()
    pair.step(MICRO, times=3)
    assert len(graphed) == 3
    assert_same_bits(graphed, eager)
    after = pair.report()
    # The inner ones are a kind of their own, captured after the first.
    assert after["replays"] - counted["replays"] == (3 + 2) * LAYERS
    assert after["eager"]["WARMING_UP"] - counted["eager"]["WARMING_UP"] == LAYERS


def test_a_block_called_by_itself_is_no_micro_batch_of_its_model(install: Install) -> None:
    """Behind a forward, and behind one that raised."""

    def call(trainer: Trainer) -> Tensor:
        """Rows without a pack, as many as no micro-batch had."""
        hidden = torch.randn(7, 1, OPTIONS.hidden, generator=torch.Generator().manual_seed(3))
        rotary = trainer.chunk.rotary_pos_emb(7)
        with torch.no_grad():
            out: Tensor = trainer.chunk.decoder(hidden, None, rotary_pos_emb=rotary)
        return out

    def broken(*_: object) -> None:
        raise ArithmeticError("an injected failure")

    trainer = Trainer(OPTIONS)
    expected = call(trainer)
    install()
    step(trainer, [MICRO], update=False, times=2)
    assert megagraph.reports()[0]["replays"] == LAYERS
    for raises in (False, True):
        error = pytest.raises(ArithmeticError) if raises else contextlib.nullcontext()
        hook = trainer.chunk.embedding.register_forward_hook(broken if raises else lambda *_: None)
        with torch.no_grad(), hook, error:
            forward(trainer.model, MICRO, trainer.device)
        (counted,) = megagraph.reports()
        assert_same_bits(call(trainer), expected)
        (after,) = megagraph.reports()
        assert (after["eager"], after["replays"]) == (counted["eager"], counted["replays"])


def test_a_frozen_model_inside_anothers_step_never_replays_moved_weights(trainer: Trainer) -> None:
    """Its addresses are looked at there too, although only its own steps capture."""

    def infer(called: Any) -> Tensor:
        with torch.no_grad():
            return forward(called, OTHER, torch.device("cpu"))[0]

    frozen, called = frozen_model(seed=3)
    for _ in range(2):
        step(trainer, [MICRO])
        expected = infer(called)
    answers = _call_inside(trainer, lambda chunk: infer(called))
    step(trainer, [MICRO])
    assert megagraph.reports()[1]["replays"] == 2 * LAYERS
    held = [param.data for param in frozen.parameters()]
    for param in frozen.parameters():
        param.data = param.data.clone()
    for old in held:
        old.fill_(float("nan"))
    step(trainer, [MICRO])
    assert_same_bits(answers, [expected] * 2)
    ran(megagraph.reports()[1], 2 * LAYERS, WARMING_UP=LAYERS, ADDRESS_MOVED=LAYERS)
