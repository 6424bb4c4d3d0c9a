# SPDX-License-Identifier: Apache-2.0
"""Attention or MLP of dense layers in graphs and the other eager: the bits of eager, and what is counted."""

import functools
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import megatron_rig as rig
import pytest
import torch
from host_rig import only
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from moe_rig import PADS, ExpertTrainer
from same_bits import assert_same_bits
from state_changes import scaled

import megagraph
from megagraph.config import GraphConfig
from megagraph.demo.trainer import Trainer
from megagraph.megatron import seams


@pytest.mark.parametrize("scopes", [("attn",), ("mlp",)])
def test_a_change_of_state_inside_the_graphed_half_alone_is_one(scopes: Sequence[str]) -> None:
    pair = rig.Pair(plugin={"cuda_graph_modules": scopes})
    pair.step(rig.ONE, rig.TWO, times=3)
    halves = {"attn": "self_attention", "mlp": "mlp"}
    (graphed,) = scopes
    (other,) = set(halves) - set(scopes)
    for name, expected in ((other, 0), (graphed, 2 * rig.LAYERS)):
        for trainer in pair.both:
            getattr(trainer.chunk.decoder.layers[1], halves[name]).eval()
        assert pair.costs(rig.ONE, rig.TWO) == ({"STATE_CHANGED": expected} if expected else {})
        pair.step(rig.ONE, rig.TWO)


BOTH = ("attn", "moe_router")


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize(
    ("make", "scopes", "where", "is_eager"),
    [
        (rig.ModelTrainer, ("mlp",), "", True),
        (rig.ModelTrainer, ("attn",), "self_attention", True),
        *((ExpertTrainer, BOTH, where, True) for where in ("mlp", "mlp.router")),
        *((ExpertTrainer, scopes, "mlp.experts", scopes != BOTH) for scopes in (BOTH, ("attn", "moe"))),
    ],
)
def test_a_hook_on_what_is_graphed_or_bypassed_keeps_its_site_eager(
    make: rig.Make, scopes: Sequence[str], where: str, is_eager: bool
) -> None:
    """Beside the graph it runs."""
    pair = rig.Pair(make, plugin={"cuda_graph_modules": scopes}, **(PADS if "moe" in scopes else {}))
    seen: list[str] = []
    for trainer in pair.both:
        module = trainer.chunk.decoder.layers[1].get_submodule(where)
        module.register_forward_hook(lambda *_: seen.append(where))
    report = pair.train([micro] for micro, *_others in rig.steps_of(3))
    rig.ran(report, failures=is_eager, WARMING_UP=rig.LAYERS, **({"FOREIGN_HOOK": 2} if is_eager else {}))
    assert len(seen) == 2 * 3


class Scaled(TransformerLayer):
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


class Between(TransformerLayer):
    """Has something of its own between its halves."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        hidden_states, context = self._forward_attention(*args, **kwargs)
        return self._forward_mlp(hidden_states * 1.5), context


def as_layers(pair: rig.Pair, kind: type, first: int) -> dict[str, Any]:
    """The report of layers that are of a host's class from the first of them on."""
    for trainer in pair.both:
        for layer in trainer.chunk.decoder.layers[first:]:
            layer.__class__ = kind
    pair.step(rig.ONE, rig.TWO, times=3)
    return pair.report()


class ByPack(TransformerLayer):
    def _forward_mlp(self, hidden_states: Any, *args: Any, packed_seq_params: Any = None, **more: Any) -> Any:
        out = super()._forward_mlp(hidden_states, *args, **more)
        return out if packed_seq_params is None else out * 2


@pytest.mark.both  # what releases hand to an MLP differs
@pytest.mark.parametrize("scopes", [("attn",), ("mlp",)])
@pytest.mark.parametrize("kind", [Scaled, ByPack])
def test_a_hosts_layer_is_split_and_handed_what_the_release_hands(kind: type, scopes: Sequence[str]) -> None:
    """Bugs: halves of its own forward could not be told apart; its MLP never got packs, as of 0.19."""
    rig.ran(as_layers(rig.Pair(plugin={"cuda_graph_modules": scopes}), kind, 0), WARMING_UP=2 * rig.LAYERS)


class Drawing(TransformerLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        torch.rand(()), random.random()
        return super().forward(*args, **kwargs)


def test_whether_a_hosts_layer_can_be_split_is_asked_without_a_trace() -> None:
    """Bug: what its forward draws and counts went on from there, before any graph."""

    def left(config: GraphConfig | None) -> tuple[rig.Run, Any, list[int]]:
        torch.manual_seed(3), random.seed(3)
        layers: list[Any] = []

        def prepare(chunk: Any) -> None:
            layers.extend(chunk.decoder.layers)
            for layer in layers:
                layer.__class__ = Drawing

        run = rig.train(config, [[rig.ONE]] * 2, prepare=prepare)
        return run, random.getstate(), [layer.calls for layer in layers]

    assert_same_bits(left(None), left(rig.graph_config(cuda_graph_modules="attn", cuda_graph_warmup_steps=5)))


def test_a_layer_that_cannot_be_split_is_named_and_the_others_replay() -> None:
    report = as_layers(rig.Pair(plugin={"cuda_graph_modules": "attn"}), Between, 1)
    assert report["eager"]["SCOPE_UNSUPPORTED"] == 2 * 2
    assert report["failures"] == [
        "layer 1 (Between) stays eager (SCOPE_UNSUPPORTED): its halves cannot be told apart: its forward, "
        f"{__name__}.Between.forward, does more than hand on what they return"
    ]


def test_the_models_config_says_scopes_and_warm_up_unless_ours_does(install: Any, caplog: Any) -> None:
    """Steps of warm-up that it named were passed over."""
    caplog.set_level(logging.INFO, logger="megagraph")
    has_modules = hasattr(TransformerConfig, "cuda_graph_modules")  # cuda_graph_scope before
    option = "cuda_graph_modules" if has_modules else "cuda_graph_scope"
    install(cuda_graph_warmup_steps=None)
    trainer = Trainer(rig.OPTIONS, config={option: ["attn"], "cuda_graph_warmup_steps": 2})
    rig.step(trainer, [rig.ONE, rig.TWO], times=3)
    assert rig.report_of(trainer)["replays"] == 2 * rig.LAYERS
    said = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert f"graphs attn of each layer, as {option} in the model's config says" in said
    assert "2 steps of warm-up, as cuda_graph_warmup_steps in the model's config says" in said
    megagraph.uninstall()
    install(cuda_graph_modules="mlp")
    trainer = Trainer(rig.OPTIONS, config={option: ["attn"]})
    both = f"GraphConfig or {option} in the model's config, got both: mlp and attn"
    with pytest.raises(ValueError, match=both):
        rig.step(trainer, [rig.ONE, rig.TWO])


@pytest.mark.parametrize("scope", ["attn", "mlp"])
def test_a_forward_that_comes_back_to_a_layer_with_graphs_again_is_noticed(scope: str) -> None:
    """Bug: the state of now was still known by what it was while the layer had no graph and did not count."""
    pair = rig.Pair(plugin={"cuda_graph_modules": scope})
    pair.step(rig.ONE)
    layers = [trainer.chunk.decoder.layers[0] for trainer in pair.both]
    forwards = [scaled(layer.forward) for layer in layers]
    padded = rig.Micro(lengths=(5, 7), padded=(8, 8))
    for _ in range(2):
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward
        pair.step(rig.ONE, times=3)
        for layer in layers:
            del layer.forward
        for micro in (rig.ONE, padded, padded, rig.ONE):  # another kind is captured, and the layer with it
            pair.step(micro)
    assert only(pair.report(), "WARMING_UP", "SCOPE_UNSUPPORTED", "STATE_CHANGED")


# -- forwards that a host sets: no layer is split where one would be passed over ---------------------

# What is graphed, and which forward is set, by the child that has it and its name.
CASES = [
    (("attn",), "", "forward"),
    (("attn",), "", "_call_impl"),
    (BOTH, "", "forward"),
    (BOTH, "", "_forward_mlp"),
    (BOTH, "mlp", "forward"),
]
WHOLE = (("", "forward"), ("", "_call_impl"))


def _doubled(trainer: ExpertTrainer, child: str, name: str) -> Callable[[], None]:
    """Sets a forward of the second layer that doubles what Megatron's makes. Returns what takes it away."""
    owner = trainer.chunk.decoder.layers[1].get_submodule(child)
    setattr(owner, name, scaled(getattr(owner, name), lambda: 2.0))
    return functools.partial(delattr, owner, name)


@pytest.mark.both
@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize(("scopes", "child", "name"), CASES)
def test_from_the_beginning_away_and_back_again(scopes: Sequence[str], child: str, name: str) -> None:
    """Bugs: a wrapper was taken for Megatron's, as named; a capture of a layer as it was had the next
    one pass over the new forward; and a layer that had one at first was never captured."""
    pair = rig.Pair(ExpertTrainer, plugin={"cuda_graph_modules": scopes})
    steps = [[micro] for micro, *_others in rig.steps_of(8)]
    takers = [_doubled(trainer, child, name) for trainer in pair.both]
    report = pair.train(steps[:3])
    assert report["eager"] == {"WARMING_UP": 2, "SCOPE_UNSUPPORTED": 2}
    assert (child, name) in WHOLE or "so that its router cannot run alone" in report["failures"][0]
    for take in takers:
        take()
    assert pair.train(steps[3:6])["replays"] - report["replays"] == 2 * 2
    for trainer in pair.both:
        _doubled(trainer, child, name)
    back = pair.train(steps[6:])
    assert back["eager"]["SCOPE_UNSUPPORTED"] >= 2 + 1 and back["eager"]["PARAMETERS_CHANGED"] == 2
    assert set(back["eager"]) <= {"WARMING_UP", "STATE_CHANGED", "SCOPE_UNSUPPORTED", "PARAMETERS_CHANGED"}


def test_a_forward_that_cannot_be_split_is_asked_once(install: rig.Install) -> None:
    """Bug: before each step, for some 100 us a layer."""
    install(cuda_graph_modules=("attn",))
    trainer, asked = rig.ModelTrainer(), []
    layer = trainer.chunk.decoder.layers[1]

    def doubled(*args: Any, forward: Any = layer.forward, **kwargs: Any) -> Any:
        out, context = forward(*args, **kwargs)
        asked.append(out.is_meta)
        return out * 2, context

    layer.forward = doubled
    of_steps = [rig.step(trainer, [rig.ONE]) and sum(asked) for _ in range(5)]
    assert 0 < of_steps[1] == of_steps[-1] and rig.report_of(trainer)["eager"]["SCOPE_UNSUPPORTED"] == 4


ALL, CHOICE = [BOTH, ("moe_router", "moe_preprocess"), ("attn", "moe"), ()], "a patch of the choice"


@pytest.mark.both
@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize(
    ("scopes", "how"),
    [*((it, "its own choices") for it in ALL), (BOTH, "a patch of the class"), (BOTH, CHOICE), ((), CHOICE)],
    ids=str,
)
def test_routing_replayed_from_some_step_on(install: Any, scopes: Any, how: str, monkeypatch: Any) -> None:
    """Or graphs would choose for ever what some micro-batch was told to. Without scopes layers are whole."""

    class Replay:
        def get_replay_topk(self, scores: Any, topk: int, groups: Any, of_groups: Any, choose: Any) -> Any:
            return choose(scores.flip(1), topk)

    install(cuda_graph_modules=(*scopes, "mlp") if scopes else ())
    pair = rig.Pair(ExpertTrainer, kinds="E-", **(PADS if scopes else {"is_grouped": True}))
    pair.train(rig.steps_of(5, tails=False)[:2])
    if how == "its own choices":
        for router in (router for trainer in pair.both for router in trainer.routers()):
            router.router_replay = Replay()
    else:
        seam = seams.EXPERT_CHOICE if how is CHOICE else seams.ROUTING
        original, at = seam.function(), int(how is not CHOICE)  # behind the router
        flip = lambda *it, **how: original(*it[:at], it[at].flip(-1), *it[at + 1 :], **how)  # noqa: E731
        monkeypatch.setattr(seam.owner(), seam.name, functools.wraps(original)(flip))
    report = pair.train(rig.steps_of(5, tails=False)[2:])
    counts = {"SCOPE_UNSUPPORTED": 18} if how is CHOICE else {"STATE_CHANGED": 6, "SCOPE_UNSUPPORTED": 2 * 3}
    assert report["eager"] == {"WARMING_UP": 6, **counts}
    assert ("(M2)" if how is CHOICE else "may be told what to choose") in report["failures"][0]
