# SPDX-License-Identifier: Apache-2.0
"""Attention or MLP of dense layers in graphs and the other eager: the bits of eager, and what is counted."""

from collections.abc import Sequence
from typing import Any

import parallel_jobs
import pytest
from host_rig import only
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron_rig import (
    LAYERS,
    ONE,
    OPTIONS,
    TWO,
    Install,
    Make,
    Micro,
    ModelTrainer,
    Pair,
    report_of,
    step,
    steps_of,
)
from moe_rig import PADS, ExpertTrainer
from state_changes import halved

import megagraph
from megagraph.config import MODULES
from megagraph.demo.trainer import Trainer
from megagraph.megatron.scopes.moe import EXPERTS, MOE, PREPROCESS, ROUTER
from megagraph.megatron.scopes.plan import PARTS


@pytest.mark.parametrize("scopes", [("attn",), ("mlp",)])
def test_a_pack_that_does_not_fit_and_a_change_of_state_inside_the_graphed_half(
    scopes: Sequence[str],
) -> None:
    pair = Pair(plugin={"cuda_graph_modules": scopes})
    pair.step(ONE, TWO, times=3)
    pair.step(ONE, Micro(lengths=parallel_jobs.MISFIT))
    assert pair.report()["eager"] == {"WARMING_UP": 2 * LAYERS, "TOO_MANY_SEQUENCES": LAYERS}
    halves = {"attn": "self_attention", "mlp": "mlp"}
    (graphed,) = scopes
    (other,) = set(halves) - set(scopes)
    for name, expected in ((other, 0), (graphed, 2 * LAYERS)):
        before = pair.report()["eager"].get("STATE_CHANGED", 0)
        for trainer in pair.both:
            getattr(trainer.chunk.decoder.layers[1], halves[name]).eval()
        pair.step(ONE, TWO)
        assert pair.report()["eager"].get("STATE_CHANGED", 0) - before == expected
        pair.step(ONE, TWO)


BOTH = ("attn", "moe_router")


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize(
    ("make", "scopes", "where", "is_eager"),
    [
        (ModelTrainer, ("mlp",), "", True),
        (ModelTrainer, ("attn",), "self_attention", True),
        *((ExpertTrainer, BOTH, where, True) for where in ("mlp", "mlp.router")),
        *((ExpertTrainer, scopes, "mlp.experts", scopes != BOTH) for scopes in (BOTH, ("attn", "moe"))),
    ],
)
def test_a_hook_on_what_is_graphed_or_bypassed_keeps_its_site_eager(
    make: Make, scopes: Sequence[str], where: str, is_eager: bool
) -> None:
    """Beside the graph it runs."""
    pair = Pair(make, plugin={"cuda_graph_modules": scopes}, **(PADS if "moe" in scopes else {}))
    seen: list[str] = []
    for trainer in pair.both:
        module = trainer.chunk.decoder.layers[1].get_submodule(where)
        module.register_forward_hook(lambda *_: seen.append(where))
    report = pair.train([micro] for micro, *_others in steps_of(3))
    assert report["eager"] == {"WARMING_UP": LAYERS, **({"FOREIGN_HOOK": 2} if is_eager else {})}
    assert len(seen) == 2 * 3


class Scaled(TransformerLayer):  # type: ignore[misc]  # megatron-core has no types
    """As ms-swift's layers: a forward of its own, with something around one half."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Has rows attend more sharply than Megatron's do."""
        core, scale = self.self_attention.core_attention, self.self_attention.core_attention.softmax_scale
        core.softmax_scale = 2.0
        try:
            hidden_states, context = self._forward_attention(*args, **kwargs)
        finally:
            core.softmax_scale = scale
        return self._forward_mlp(hidden_states, None), context


class Between(TransformerLayer):  # type: ignore[misc]  # megatron-core has no types
    """Has something of its own between its halves."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Changes what the first half hands out."""
        hidden_states, context = self._forward_attention(*args, **kwargs)
        return self._forward_mlp(hidden_states * 1.5), context


@pytest.mark.parametrize("scopes", [("attn",), ("mlp",)])
def test_a_hosts_layer_is_split_inside_of_its_own_forward(scopes: Sequence[str]) -> None:
    """Bug: its halves could not be told apart, because its forward was not Megatron's."""
    pair = Pair(plugin={"cuda_graph_modules": scopes})
    for trainer in pair.both:
        for layer in trainer.chunk.decoder.layers:
            layer.__class__ = Scaled
    pair.step(ONE, TWO, times=3)
    assert pair.report()["eager"] == {"WARMING_UP": 2 * LAYERS} and pair.report()["failures"] == []


def test_a_layer_that_cannot_be_split_is_named_and_the_others_replay() -> None:
    pair = Pair(plugin={"cuda_graph_modules": "attn"})
    for trainer in pair.both:
        trainer.chunk.decoder.layers[1].__class__ = Between
    pair.step(ONE, TWO, times=3)
    assert pair.report()["eager"]["SCOPE_UNSUPPORTED"] == 2 * 2
    assert pair.report()["failures"] == [
        "layer 1 (Between) stays eager (SCOPE_UNSUPPORTED): its halves cannot be told apart: its forward, "
        f"{__name__}.Between.forward, does more than hand on what they return"
    ]


def test_the_models_own_config_names_scopes(install: Install) -> None:
    has_modules = hasattr(TransformerConfig, "cuda_graph_modules")  # cuda_graph_scope before
    option = "cuda_graph_modules" if has_modules else "cuda_graph_scope"
    install()
    trainer = Trainer(OPTIONS, config={option: ["attn"]})
    step(trainer, [ONE, TWO], times=3)
    assert report_of(trainer)["replays"] == 2 * 2 * LAYERS
    megagraph.uninstall()
    install(cuda_graph_modules="mlp")
    trainer = Trainer(OPTIONS, config={option: ["attn"]})
    with pytest.raises(
        ValueError, match=f"GraphConfig or {option} in the model's config, got both: mlp and attn"
    ):
        step(trainer, [ONE, TWO])


def test_every_option_has_a_half() -> None:
    parts = (*PARTS, MOE, ROUTER, PREPROCESS)
    assert {part.name for part in parts if part is not EXPERTS} == set(MODULES)


@pytest.mark.parametrize("scope", ["attn", "mlp"])
def test_a_forward_that_comes_back_to_a_layer_with_graphs_again_is_noticed(scope: str) -> None:
    """Bug: the state of now was still known by what it was while the layer had no graph and did not count."""
    pair = Pair(plugin={"cuda_graph_modules": scope})
    pair.step(ONE)
    layers = [trainer.chunk.decoder.layers[0] for trainer in pair.both]
    forwards = [halved(layer.forward) for layer in layers]
    padded = Micro(lengths=(5, 7), padded=(8, 8))
    for _ in range(2):
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward
        pair.step(ONE, times=3)
        for layer in layers:
            del layer.forward
        for micro in (ONE, padded, padded, ONE):  # another kind is captured, and the layer with it
            pair.step(micro)
    assert only(pair.report(), "WARMING_UP", "SCOPE_UNSUPPORTED", "STATE_CHANGED")
