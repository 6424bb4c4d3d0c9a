# SPDX-License-Identifier: Apache-2.0
"""Blocks that override Megatron's forward: what they do between layers is done, and counted right."""

import dataclasses
from typing import Any

import pytest
import torch
from host_rig import FULL, ONE, OTHER, TWO, OwnBlock, OwnModel, host_pair, only
from megatron.core.models.gpt import GPTModel
from megatron_rig import LAYERS, OPTIONS, step
from same_bits import assert_same_bits
from torch import Tensor

import megagraph

pytestmark = pytest.mark.both


class ScaledBlock(OwnBlock):
    """Between layers it works on every row; autograd keeps the rows for that."""

    def between(self, index: int, hidden_states: Tensor) -> Tensor:
        return hidden_states * hidden_states.tanh() if index % 2 == 0 else hidden_states


FOUR = dataclasses.replace(OPTIONS, layers=4)


def test_work_between_layers_is_done_and_no_layer_is_replayed_over_what_it_needs() -> None:
    """A layer that would be staged into the former one's output runs eager; without gradients none is."""
    pair = host_pair(GPTModel, ScaledBlock, options=FOUR)
    pair.step(ONE, TWO, times=5)
    trained = pair.report()
    assert only(trained, "WARMING_UP", "NESTING") and trained["eager"]["NESTING"] > 0
    for _ in range(4):
        pair.evaluate(OTHER)
    report = pair.report()
    assert report["replays"] - trained["replays"] == 3 * 4
    assert report["eager"]["NESTING"] == trained["eager"]["NESTING"]


class InPlaceBlock(OwnBlock):
    """Adds features to some rows in place, after its first layer."""

    chosen: Tensor  # rows of the pack as it was given

    def between(self, index: int, hidden_states: Tensor) -> Tensor:
        if index == 0:
            hidden_states[self.chosen] = hidden_states[self.chosen] + 1.5
        return hidden_states


def test_rows_that_a_block_chooses_between_layers_are_those_of_the_pack_as_given() -> None:
    pair = host_pair(OwnModel, InPlaceBlock)
    for micro in (ONE, TWO, FULL, OTHER, ONE, TWO):
        for trainer in pair.both:
            trainer.chunk.decoder.chosen = torch.arange(micro.physical, device=trainer.device) % 3 == 0
        pair.step(micro)
    assert only(pair.report(), "WARMING_UP", "NESTING")


class BiasedBlock(OwnBlock):
    """Gives its second layer an argument of its own."""

    def further_arguments(self, index: int) -> dict[str, Any]:
        return {"padding_mask": torch.zeros(1)} if index == 1 else {}


def test_a_layer_that_is_called_in_another_way_runs_as_given() -> None:
    pair = host_pair(GPTModel, BiasedBlock)
    left = [step(trainer, [FULL]) for trainer in pair.both for _ in range(4)]
    for one, other in zip(left[:4], left[4:], strict=True):
        assert_same_bits(one, other)
    _eager, report = megagraph.reports()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "SIGNATURE_CHANGED": 2}
    assert report["replays"] == 2


class PartsBlock(OwnBlock):
    """Runs parts of its layers, and no layer."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Any,
        attention_mask: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **further: Any,
    ) -> Any:
        for layer in self.layers:
            out, bias = layer.mlp(hidden_states)
            hidden_states = hidden_states + out + bias
        return self.final_layernorm(hidden_states)


def test_a_block_that_calls_no_layer_is_refused_and_counted() -> None:
    pair = host_pair(GPTModel, PartsBlock)
    pair.step(FULL, times=6)
    report = pair.report()
    assert report["replays"] == 0 and report["eager"]["SCOPE_UNSUPPORTED"] >= 2 * LAYERS
    assert "some calls do not reach" in report["failures"][-1]


def test_hooks_on_layers_of_an_overriding_block_run() -> None:
    pair = host_pair(GPTModel, OwnBlock)
    seen: list[torch.Size] = []
    for trainer in pair.both:
        layer = trainer.chunk.decoder.layers[1]
        layer.register_forward_hook(lambda _layer, _args, out: seen.append(out[0].shape))
    pair.step(ONE, times=4)
    assert len(seen) == 2 * 4 and {shape[0] for shape in seen} == {ONE.physical}
    assert only(pair.report(), "WARMING_UP", "FOREIGN_HOOK")


def test_a_hosts_own_forward_of_a_layer_is_still_there_after_a_micro_batch() -> None:
    """What the plugin takes away is its own alone."""
    pair = host_pair(GPTModel, OwnBlock)
    forwards = []
    for trainer in pair.both:
        layer = trainer.chunk.decoder.layers[1]

        def forward(*args: Any, _megatrons: Any = layer.forward, **kwargs: Any) -> Any:
            out, context = _megatrons(*args, **kwargs)
            return out * 1.5, context

        layer.forward = forward
        forwards.append(forward)
    for micro in (ONE, TWO, FULL):
        pair.step(micro)
        for trainer, forward in zip(pair.both, forwards, strict=True):
            first, second = trainer.chunk.decoder.layers
            assert second.forward is forward and "forward" not in vars(first)
    assert only(pair.report(), "WARMING_UP")
