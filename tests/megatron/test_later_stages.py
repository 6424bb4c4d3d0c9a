# SPDX-License-Identifier: Apache-2.0
"""A model chunk that begins with hidden states of another stage: decided, padded, replayed and cut alike."""

from typing import Any

import megatron_rig
import pytest
import torch
from megatron_rig import LAYERS, OPTIONS, Install, Micro, Step, step
from same_bits import assert_same_bits
from torch import Tensor, nn

import megagraph
from megagraph.demo.trainer import Trainer
from megagraph.megatron.specs import get_gpt_block_varlen_spec

PACKS = [(9, 20), (3, 30, 8), (64,), (12,), (5, 5, 5)]
MISFIT = (4,) * 9


class StageTrainer(Trainer):
    """Trains a chunk that embeds nothing."""

    def __init__(self, *, is_last: bool, has_ids: bool, **further: Any) -> None:
        self.is_last, self.has_ids = is_last, has_ids
        self.inputs: list[Tensor] = []
        super().__init__(OPTIONS, **further)

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        from megatron.core.models.gpt import GPTModel

        made: nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_block_varlen_spec(config),
            vocab_size=OPTIONS.vocab,
            max_sequence_length=OPTIONS.max_tokens,
            position_embedding_type="rope",
            pre_process=False,
            post_process=self.is_last,
            share_embeddings_and_output_weights=False,
        )
        return made

    def forward(self, micro: Micro) -> tuple[Tensor, Any]:
        """A micro-batch of hidden states that another stage would send."""
        tokens, labels, mask, positions = (rows.to(self.device) for rows in micro.row_lists())
        generator = torch.Generator().manual_seed(micro.seed)
        hidden = torch.randn(tokens.numel(), 1, OPTIONS.hidden, generator=generator).to(self.device)
        dtype = torch.bfloat16 if OPTIONS.bf16 else torch.float32
        self.inputs.append(hidden.to(dtype).requires_grad_(torch.is_grad_enabled()))
        self.chunk.set_input_tensor(self.inputs[-1])
        out = self.model(
            input_ids=tokens[None] if self.has_ids else None,
            position_ids=positions[None] if self.has_ids else None,
            attention_mask=None,
            labels=labels[None] if self.is_last else None,
            packed_seq_params=micro.params(self.device),
        )
        assert out.shape == ((1, tokens.numel()) if self.is_last else (tokens.numel(), 1, OPTIONS.hidden))
        of_rows = out if self.is_last else out.float().square().mean(-1).view(1, -1)
        return of_rows, lambda losses: megatron_rig._loss(losses, mask)


CASES = {
    "the last stage": {"is_last": True, "has_ids": False},
    "the last stage, with ids": {"is_last": True, "has_ids": True},
    "a stage in between": {"is_last": False, "has_ids": False},
}


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, install: Install, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two chunks of the same weights."""
    install()
    trainers = [StageTrainer(**CASES[request.param]) for _ in range(2)]
    by_model = {id(trainer.model): trainer for trainer in trainers}
    monkeypatch.setattr(
        megatron_rig, "forward", lambda model, micro, device: by_model[id(model)].forward(micro)
    )
    return trainers


def _step(trainer: StageTrainer, lengths: list[tuple[int, ...]], *, eager: bool = False) -> Step:
    """A step, with the gradients of what was handed over."""
    trainer.inputs.clear()
    micros = [Micro(lengths=each, seed=sum(each)) for each in lengths]
    left = step(trainer, micros, eager=eager)
    for index, given in enumerate(trainer.inputs):
        assert given.grad is not None
        left.grads[f"input {index}"] = given.grad.clone()
    return left


def test_a_chunk_replays_with_the_bits_of_eager(pair: list[StageTrainer]) -> None:
    eager, graphed = pair
    for index in range(6):
        lengths = [PACKS[(index + place) % len(PACKS)] for place in range(3)]
        assert_same_bits(_step(eager, lengths, eager=True), _step(graphed, lengths), f"step {index}")
    lengths = [PACKS[0], MISFIT]
    assert_same_bits(_step(eager, lengths, eager=True), _step(graphed, lengths), "a pack that does not fit")
    _of_eager, report = megagraph.reports()
    assert report["eager"] == {"WARMING_UP": 3 * LAYERS, "TOO_MANY_SEQUENCES": LAYERS}
    assert report["replays"] == (5 * 3 + 1) * LAYERS and report["failures"] == []
    assert report["verification"]["verified"] == 1
    assert graphed.chunk.decoder.input_tensor is graphed.inputs[-1]
