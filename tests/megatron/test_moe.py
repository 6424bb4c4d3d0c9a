# SPDX-License-Identifier: Apache-2.0
"""Layers of experts: attention in graphs and experts eager, with the bits of mode `eager`."""

import dataclasses
from typing import Any
from unittest import mock

import megatron_rig as rig
import moe_rig
import pytest
import torch
from moe_rig import ATTENTION, BIAS, BIASED, PACK, PERMUTATION, ROUTERS, TAILS, WAYS, ExpertTrainer, of
from moe_rig import GROUPED_EXPERTS as GROUPED
from same_bits import assert_same_bits
from torch import Tensor

import megagraph
from megagraph.megatron.graphs.refusals import refusal_of
from megagraph.megatron.parallel.model_parallel import need_equal_rows

pytestmark = pytest.mark.usefixtures("experts")
WARM_UP = {"WARMING_UP": 3 * 2}


# As of one stage of a pipeline whose dense layers lie in another.
ELSEWHERE = {**moe_rig.CASES["drop"], "moe_layer_freq": [0, 1]}


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_model_of_which_nothing_can_be_graphed_has_the_bits_of_an_unpatched_one(mode: str) -> None:
    """Bug: what it ran before a capture, and in mode `eager` always, were canonical packs."""
    given = rig.steps_of(2, tails=False)
    config = rig.graph_config(cuda_graph_modules="mlp", mode=mode)
    ours = rig.train(config, given, ExpertTrainer, **ELSEWHERE)
    assert_same_bits(ours, rig.train(None, given, ExpertTrainer, **ELSEWHERE))
    assert ours.report["eager"] == {"SCOPE_UNSUPPORTED": 2 * 3 * 2}
    assert ours.report["failures"] == [
        "GPTModel stays eager (SCOPE_UNSUPPORTED): no layer of it can be graphed; layer 0 "
        "(TransformerLayer): it has nothing that mlp would graph"
    ]


# -- rows past a pack's end ------------------------------------------------------------------------


class Routed:
    """Keeps what the routers of a model make of each micro-batch, and what comes out of its block."""

    def __init__(self, trainer: ExpertTrainer) -> None:
        self.maps: list[Tensor] = []
        self.probs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        trainer.chunk.decoder.register_forward_hook(lambda *call: self.outputs.append(call[-1].detach()))
        for router in trainer.routers():
            router.register_forward_hook(self._keep)

    def _keep(self, _router: Any, _args: Any, out: tuple[Tensor, Tensor]) -> None:
        probs, routing_map = out
        self.probs.append(probs.detach().clone())
        self.maps.append(routing_map.clone())


TAILED = ("alltoall", "allgather", "drop", "drop and pad", BIASED)


@pytest.mark.parametrize(
    ("mode", "way", "case"),
    [
        *(("eager", ATTENTION, case) for case in TAILED),
        *(("graph", ROUTERS, case) for case in TAILED),
        *(("graph", ATTENTION, case) for case in ("drop", BIASED)),
        *((mode, GROUPED, BIASED) for mode in ("eager", "graph")),
    ],
)
def test_a_longer_tail_changes_nothing(install: rig.Install, way: str, case: str, mode: str) -> None:
    install(mode=mode, cuda_graph_modules=WAYS[way].scopes)
    changes = {**of(way, case), "moe_router_bias_update_rate": 0.0}
    trainer = ExpertTrainer(is_grouped=way == GROUPED, **changes)
    rig.step(trainer, [PACK], update=False)
    routed = Routed(trainer) if way == ATTENTION else None
    end, found = sum(PACK.lengths), []
    for index, tail in enumerate(TAILS):
        left = rig.step(trainer, [dataclasses.replace(PACK, tail=tail, tail_token=index)], update=False)
        left.losses[:] = [each[:end] for each in left.losses]
        if way == ATTENTION and rig.ON_GPU:  # where the output layer takes another kernel for other rows
            left.losses, left.grads = [], {}
        assert all(int(counts.sum()) == 2 * end for counts in left.counts)
        found.append(left)
    if way != GROUPED or not rig.ON_GPU:  # where another kernel multiplies other rows
        for other in found[1:]:
            assert_same_bits(found[0], other)
    if routed is not None:
        assert_routed_alike(routed, end, changes)
    assert rig.report_of(trainer)["replays"] == 2 * len(TAILS) * (mode == "graph")


def assert_routed_alike(routed: Routed, end: int, changes: moe_rig.Config) -> None:
    """In both layers, with each tail."""
    assert all(torch.equal(output[:end], routed.outputs[0][:end]) for output in routed.outputs[1:])
    first = list(zip(routed.maps, routed.probs, strict=True))[:2]
    assert len(routed.maps) == 2 * len(TAILS)
    for index, (routing_map, probs) in enumerate(zip(routed.maps, routed.probs, strict=True)):
        assert routing_map.size(0) == rig.CAPACITY.tokens
        assert torch.equal(routing_map[:end], first[index % 2][0][:end])
        assert torch.equal(probs, first[index % 2][1]) and not probs[end:].any()
        if not changes.get("moe_pad_expert_input_to_capacity"):  # which fills up with rows of no weight
            assert not routing_map[end:].any()
            assert "moe_expert_capacity_factor" in changes or int(routing_map.sum()) == 2 * end


@pytest.mark.skipif(torch.cuda.is_available(), reason="in bfloat16 a rounding routes a token elsewhere")
@pytest.mark.parametrize("case", ["alltoall", "allgather", "shared experts", "sigmoid, bias, groups"])
def test_eager_agrees_with_megatron_alone(case: str) -> None:
    """Which takes no tail. Sums of losses have other roundings with a mask."""
    steps = rig.steps_of(1, tails=False)
    ours = rig.train(rig.graph_config(mode="eager"), steps, ExpertTrainer, **moe_rig.CASES[case])
    alone = rig.train(None, steps, ExpertTrainer, **moe_rig.CASES[case])
    one, other = ours.steps[0], alone.steps[0]
    for name in ("losses", "grads", "metrics"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-6)
    assert [int(each.sum()) for each in one.counts] == [int(each.sum()) for each in other.counts]


def test_a_model_that_is_refused_keeps_megatrons_routing() -> None:
    """Masked rows are routed there; Megatron's own count of them for a bias raises, here it does not."""
    changes = {**moe_rig.DROPS, **moe_rig.FULL_RECOMPUTE}
    steps = rig.steps_of(2, masks=True, tails=False)
    ours = rig.train(rig.graph_config(cuda_graph_modules="attn"), steps, ExpertTrainer, **changes)
    assert_same_bits(ours, rig.train(None, steps, ExpertTrainer, **changes))
    assert set(ours.report["eager"]) == {"RECOMPUTING"}
    with pytest.raises(RuntimeError):
        rig.train(None, steps, ExpertTrainer, **BIAS)
    biased = rig.train(rig.graph_config(), steps, ExpertTrainer, **{**BIAS, **changes})
    assert set(biased.report["eager"]) == {"RECOMPUTING"} and any(biased.steps[0].counts[0])


# -- what goes wrong, and what is refused ----------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "place"),
    [
        *((ROUTERS, place) for place in ("dispatch", "combine")),
        *((PERMUTATION, place) for place in ("dispatch", "experts")),
    ],
)
def test_an_error_leaves_the_next_step_right(way: str, place: str) -> None:
    changes = {**BIAS, **(moe_rig.PADS if way == PERMUTATION else {})}
    pair = rig.Pair(ExpertTrainer, plugin={"cuda_graph_modules": WAYS[way].scopes}, **changes)
    first, second, lost, *others = rig.steps_of(5)
    pair.train([first, second])
    for trainer in pair.both:
        where = f"megatron.core.transformer.moe.{moe_rig.PLACES[place]}"
        with mock.patch(where, moe_rig.lose), pytest.raises(OSError, match="lost"):
            rig.step(trainer, lost, eager=trainer is pair.eager)
        assert trainer is pair.eager or not moe_rig.tensors_of_calls(trainer)
        rig.metrics()
        for router in trainer.routers():
            router.local_tokens_per_expert.zero_()
    # Nothing of the step that raised is kept by the dispatcher, so that no slot is.
    report = pair.train(others)
    assert report["eager"] == WARM_UP and report["replays"] == 3 * 3 * 2 + 1


@pytest.fixture
def trainer() -> ExpertTrainer:
    return ExpertTrainer()


def test_foreign_classes_are_refused_by_name(trainer: ExpertTrainer) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

    class OwnLayer(MoELayer): ...  # type: ignore[misc]  # megatron-core has no types

    class OwnDispatcher(MoEAllGatherTokenDispatcher): ...  # type: ignore[misc]

    layer = trainer.chunk.decoder.layers[1].mlp
    for owner, own, what in (
        (layer, OwnLayer, "in a layer of class"),
        (layer.token_dispatcher, OwnDispatcher, "with another dispatcher"),
    ):
        megatrons, owner.__class__ = type(owner), own
        of = "(moe_token_dispatcher_type='alltoall')" if own is OwnDispatcher else own.__qualname__
        said = f"mixture of experts {what} {of} is not supported yet"
        assert rig.refused(trainer.chunk, trainer.model) == said
        owner.__class__ = megatrons
    assert refusal_of(trainer.chunk, trainer.model) is None


def test_which_experts_over_several_ranks_need_equal_rows(
    trainer: ExpertTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trainer.chunk.config
    monkeypatch.setattr(config, "moe_pad_expert_input_to_capacity", True)
    assert not need_equal_rows(config)
    monkeypatch.setattr(config, "expert_model_parallel_size", 2)
    assert need_equal_rows(config) and refusal_of(trainer.chunk, trainer.model) is None
    monkeypatch.setattr(config, "moe_pad_expert_input_to_capacity", False)
    assert not need_equal_rows(config)
    monkeypatch.setattr(config, "moe_token_dispatcher_type", "allgather")
    assert need_equal_rows(config) and refusal_of(trainer.chunk, trainer.model) is None


def test_packs_whose_rows_are_samples_run_as_given(install: rig.Install, trainer: ExpertTrainer) -> None:
    params = PACK.params(trainer.device)
    if not hasattr(params, "tokens_per_sample"):
        pytest.skip("this release of megatron-core has no tokens_per_sample")
    install(cuda_graph_modules="attn")
    rig.step(trainer, [PACK], update=False)
    tokens, labels, _mask, positions = (rows[None].to(trainer.device) for rows in PACK.row_lists())
    params = dataclasses.replace(params, tokens_per_sample=PACK.physical // 2)

    def losses() -> Tensor:
        with torch.no_grad():
            out: Tensor = trainer.chunk(tokens, positions, None, labels=labels, packed_seq_params=params)
            return out.clone()

    ours = losses()
    assert megagraph.reports()[0]["eager"] == {"WARMING_UP": 2, "SIGNATURE_CHANGED": 2}
    megagraph.uninstall()
    assert torch.equal(ours, losses())
