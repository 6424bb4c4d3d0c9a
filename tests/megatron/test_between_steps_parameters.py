# SPDX-License-Identifier: Apache-2.0
"""Parameters that are not the plain case: adapters, tied embeddings, weights loaded in the middle."""

from typing import Any

import pytest
import torch
from megatron_rig import (
    LAYERS,
    ONE,
    OPTIONS,
    OTHER,
    TWO,
    Pair,
    Step,
    compare_runs,
    graph_config,
    plain,
    report_of,
    step,
    weights,
)
from same_bits import assert_same_bits
from torch import Tensor, nn

import megagraph
from megagraph.demo.trainer import Trainer, gpt_model

STEPS = [[ONE, TWO], [OTHER, ONE], [TWO, TWO], [ONE, OTHER]]
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class LowRank(nn.Module):
    """A linear layer of Megatron with a low-rank addition."""

    def __init__(self, inner: Any, width: int = 4) -> None:
        super().__init__()
        self.inner = inner
        rows, columns = inner.weight.shape
        generator = torch.Generator().manual_seed(rows * columns)

        def parameter(*shape: int) -> nn.Parameter:
            values = torch.empty(shape).normal_(0, 0.05, generator=generator)
            return nn.Parameter(values.to(inner.weight))

        self.down, self.up = parameter(width, columns), parameter(rows, width)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.inner(hidden, *args, **kwargs)
        return out + nn.functional.linear(nn.functional.linear(hidden, self.down), self.up), bias


def _adapt(layers: Any, names: tuple[str, ...] = LINEARS) -> None:
    for layer in layers:
        for owner in (layer.self_attention, layer.mlp):
            for name in names:
                if hasattr(owner, name):
                    setattr(owner, name, LowRank(getattr(owner, name)))


@pytest.mark.parametrize(
    ("names", "first"),
    [(LINEARS, 0), (LINEARS, 1), (("linear_qkv",), 0), (("linear_proj", "linear_fc2"), 0)],
    ids=["all", "of one layer", "qkv", "rows"],
)
def test_adapters_in_a_frozen_model_are_graphed_with_eager_bits(names: tuple[str, ...], first: int) -> None:
    def with_adapters(model: Any) -> None:
        model.requires_grad_(False)
        _adapt(model.decoder.layers[first:], names)

    graphed = compare_runs(STEPS, prepare=with_adapters)
    assert graphed.report["replays"] == 3 * 2 * LAYERS and graphed.report["failures"] == []
    assert graphed.report["eager"] == {"WARMING_UP": 2 * LAYERS}
    trained = {name for name, _ in graphed.steps[0].grads.items()}
    assert len(trained) == 2 * len(names) * (LAYERS - first)
    assert all(name.endswith((".down", ".up")) for name in trained)
    assert all(grad.any() for grad in graphed.steps[-1].grads.values())


def test_adapters_that_come_later_cost_one_eager_step(pair: Pair) -> None:
    """DDP does not know them: their gradients stay in `.grad`."""
    pair.step(ONE, times=2)
    for trainer in pair.both:
        _adapt(trainer.chunk.decoder.layers)
    pair.step(TWO, OTHER, times=3)
    adapter = pair.graphed.chunk.decoder.layers[0].mlp.linear_fc1
    assert not hasattr(adapter.up, "main_grad") and adapter.up.grad.any()
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": LAYERS, "ADDRESS_MOVED": 2 * LAYERS}
    assert report["replays"] == (1 + 4) * LAYERS and report["failures"] == []


class TiedTrainer(Trainer):
    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        return gpt_model(self.options, config, spec, share_embeddings_and_output_weights=True)


def test_tied_embeddings_have_eager_bits() -> None:
    graphed = compare_runs(STEPS, TiedTrainer, options=OPTIONS)
    assert "output_layer.weight" not in graphed.weights
    assert graphed.report["replays"] == 3 * 2 * LAYERS and graphed.report["failures"] == []


def _load(trainer: Any, state: dict[str, Tensor]) -> None:
    trainer.chunk.load_state_dict(state, strict=False)
    trainer.optimizer.reload_model_params()


def test_a_checkpoint_loaded_in_place_is_what_graphs_read_from_then_on(pair: Pair) -> None:
    saved = weights(pair.graphed.chunk)
    pair.step(ONE, TWO, times=3)
    graphs = pair.report()["graphs"]
    for trainer in pair.both:
        _load(trainer, saved)
    assert all(torch.equal(weight, saved[name]) for name, weight in weights(pair.graphed.chunk).items())
    pair.step(TWO, OTHER, times=2)
    pair.evaluate(ONE)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": (2 + 1) * LAYERS}
    assert report["replays"] == (4 + 4) * LAYERS and report["graphs"] == graphs


def _replace(param: nn.Parameter, held: list[Tensor]) -> None:
    """Other values in other memory; what reads the old one from now on reads NaN."""
    held.append(param.data)
    param.data = param.data.flip(0).contiguous()
    held[-1].fill_(float("nan"))


OWNERS = {
    **dict.fromkeys(("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.bias"), 2),
    # Outside of the layers.
    **dict.fromkeys(("embedding.word_embeddings.weight", "decoder.final_layernorm.weight"), 0),
}


@pytest.mark.parametrize("name", OWNERS)
def test_one_weight_in_other_memory_costs_the_layers_one_eager_step(name: str, pair: Pair) -> None:
    pair.step(ONE, TWO, times=2)
    held: list[Tensor] = []
    for trainer in pair.both:
        _replace(trainer.chunk.get_parameter(name), held)
        trainer.optimizer.reload_model_params()
    pair.step(TWO, OTHER, times=3)
    report, moved = pair.report(), OWNERS[name] * LAYERS
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, **({"ADDRESS_MOVED": moved} if moved else {})}
    assert report["replays"] == (2 + 6) * LAYERS - moved and len(held) == 2


def test_weights_that_move_between_schedule_calls_of_one_step_are_seen(pair: Pair) -> None:
    """Each schedule call is a boundary of its own, whatever the host calls a step. Only the first move costs
    a call: weights that moved once move again."""
    pair.step(ONE, times=2)
    for _ in range(2):
        held: list[Tensor] = []
        for trainer in pair.both:
            for param in trainer.chunk.decoder.parameters():
                _replace(param, held)
            trainer.optimizer.reload_model_params()
        pair.evaluate(TWO)
        pair.step(TWO)
    (eager, graphed) = megagraph.reports()
    assert eager["replays"] == 0
    assert graphed["eager"] == {"WARMING_UP": LAYERS, "ADDRESS_MOVED": LAYERS}
    assert graphed["replays"] == (1 + 3) * LAYERS


def test_a_parameter_that_gets_no_gradient_any_more_holds_no_bucket_up() -> None:
    """Megatron reduces a bucket when as many parameters are ready as in the first step.

    A graph delivers no gradient of such a parameter; without a word of it the reduction never begins.
    """
    uses = [True]

    def scaled(model: Any) -> None:
        mlp = model.decoder.layers[0].mlp
        mlp.scale = scale = nn.Parameter(torch.full((), 1.5))
        inner = mlp.forward

        def forward(*arguments: Any, **further: Any) -> tuple[Tensor, Tensor | None]:
            out, bias = inner(*arguments, **further)
            return (out * scale if uses[0] else out), bias

        mlp.forward = forward

    def run(**ddp: Any) -> tuple[list[Step], dict[str, Any]]:
        megagraph.install(graph_config())
        trainer = plain(ddp=ddp, prepare=scaled)
        found = []
        for index in range(4):
            uses[0] = index == 0  # in the warm-up, by which Megatron counts, and never again
            found.append(step(trainer, [ONE, TWO], eager=not ddp))
        report = report_of(trainer)
        megagraph.uninstall()
        return found, report

    graphed, report = run(overlap_grad_reduce=True)
    eager, _ = run()  # which cannot overlap here: its own hooks would not report the parameter
    assert_same_bits(graphed, eager, "steps")
    assert graphed[0].grads["decoder.layers.0.mlp.scale"].any()
    assert not graphed[-1].grads["decoder.layers.0.mlp.scale"].any()
    assert report["replays"] == 3 * 2 * LAYERS and report["failures"] == []
