# SPDX-License-Identifier: Apache-2.0
"""Routers of experts in graphs, with attention or without; dispatch, experts and combine eager."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import moe_jobs
import moe_rig
import pytest
import torch
from megatron_rig import Micro, step
from moe_cases import ROUTED
from moe_rig import (
    PACK,
    PLACES,
    TAILS,
    ExpertTrainer,
    compare,
    compare_runs,
    compare_steps,
    expert_step,
    lose,
    steps_of,
    tensors_of_calls,
)
from same_bits import assert_same_bits
from worlds import World, Worlds

import megagraph
from megagraph.config import GraphConfig
from megagraph.megatron import seams
from megagraph.megatron.scopes.moe import ROUTER

pytestmark = [
    pytest.mark.megatron,
    # Of shared experts that overlap, whose gradients Megatron makes on a stream of its own.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]

Install = Callable[..., GraphConfig]
Config = dict[str, Any]
BOTH = ("attn", "moe_router")
BIAS = ROUTED["sigmoid, bias, groups"]


@pytest.fixture(autouse=True)
def experts() -> Iterator[None]:
    moe_rig.forget_metrics()
    with moe_rig.experts_on_cpu():
        yield


@pytest.mark.parametrize("scopes", [BOTH, ("moe_router",)], ids=str)
def test_shared_experts_that_recompute(scopes: Sequence[str]) -> None:
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["shared_experts", "core_attn"]}
    report = compare("EE", steps_of(5), scopes, **ROUTED["shared experts"], **recompute)
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * 2}


@pytest.mark.parametrize("case", ["shared experts", "shared experts, overlapped"])
def test_what_leaves_the_router_and_in_which_order(case: str) -> None:
    trainer = ExpertTrainer(**ROUTED[case])
    layer, rows = trainer.chunk.decoder.layers[0], 24
    hidden = torch.rand(rows, 1, 32, device=trainer.device, dtype=trainer.chunk.config.params_dtype)
    mask = torch.arange(rows, device=trainer.device)[None] >= 20
    for given in (hidden, hidden.clone().requires_grad_() * 1):
        normed, probs, routing_map, *shared, residual = ROUTER.run(layer, given, {"padding_mask": mask})
        assert normed.shape == residual.shape == hidden.shape and torch.equal(residual, hidden)
        assert torch.equal(normed, layer.pre_mlp_layernorm(hidden))
        assert probs.shape == routing_map.shape == (rows, moe_rig.EXPERTS) and probs.requires_grad
        assert routing_map.dtype is torch.bool and not routing_map.requires_grad
        if case == "shared experts":
            assert torch.equal(shared[0], layer.mlp.shared_experts(normed))
        else:
            assert shared == []
        kept = getattr(layer, "mlp_norm_manager", None)  # it would keep the graph's memory, too
        assert kept is None
        # What entered a site lies where the next micro-batch's will.
        assert (residual is given) == (not given.is_leaf)


@pytest.mark.parametrize("scopes", [BOTH, ("moe_router",)], ids=str)
def test_layers_without_a_norm_before_their_experts(install: Install, scopes: Sequence[str]) -> None:
    """What enters a router alone is then what leaves it, too."""
    from megatron.core.transformer.identity_op import IdentityOp

    install(cuda_graph_modules=scopes)
    trainers = [ExpertTrainer(**ROUTED["shared experts"]) for _ in range(2)]
    for trainer in trainers:
        for layer in trainer.chunk.decoder.layers:
            layer.pre_mlp_layernorm = IdentityOp()
    compare_steps(trainers, steps_of(5))
    assert megagraph.reports()[1]["eager"] == {"WARMING_UP": 3 * 2}


def test_steps_without_graphs_between(install: Install) -> None:
    install(cuda_graph_modules=BOTH)

    def run(trainer: ExpertTrainer, is_eager: bool) -> list[Any]:
        return [
            expert_step(trainer, micros, eager=is_eager or index in (2, 4))
            for index, micros in enumerate(steps_of(6))
        ]

    compare_runs([ExpertTrainer(**BIAS) for _ in range(2)], run)
    assert megagraph.reports()[1]["eager"] == {"WARMING_UP": 3 * 2, "DISABLED": 2 * 3 * 2}


@pytest.mark.parametrize("case", ["alltoall", "allgather", "drop", "drop and pad", "sigmoid, bias, groups"])
def test_a_longer_tail_changes_nothing(install: Install, case: str) -> None:
    install(cuda_graph_modules=BOTH)
    trainer = ExpertTrainer(**{**ROUTED[case], "moe_router_bias_update_rate": 0.0})
    step(trainer, [PACK], update=False)
    moe_rig.metrics()
    found = []
    for index, tail in enumerate(TAILS):
        micro = dataclasses.replace(PACK, tail=tail, tail_token=index)
        left = expert_step(trainer, [micro], update=False)
        losses = [each[: sum(PACK.lengths)] for each in left.left.losses]
        found.append(dataclasses.replace(left, left=dataclasses.replace(left.left, losses=losses)))
    for other in found[1:]:
        assert_same_bits(found[0], other)
    (report,) = megagraph.reports()
    assert report["replays"] == 2 * len(TAILS)


# -- state that no module owns -----------------------------------------------------------------------


def test_metrics_that_are_replaced_between_steps_are_noticed(install: Install) -> None:
    """Graphs would go on adding to tensors that nobody reads."""
    install(cuda_graph_modules=BOTH)

    def run(trainer: ExpertTrainer, is_eager: bool) -> list[Any]:
        found = []
        for index, micros in enumerate(steps_of(8)):
            if index in (3, 6):
                moe_rig.forget_metrics()
            found.append(expert_step(trainer, micros, eager=is_eager))
        return found

    compare_runs([ExpertTrainer(**ROUTED["several losses"]) for _ in range(2)], run)
    eager = megagraph.reports()[1]["eager"]
    assert eager["ADDRESS_MOVED"] >= 3 * 2 and eager["WARMING_UP"] == 3 * 2
    assert set(eager) == {"ADDRESS_MOVED", "WARMING_UP"}


@pytest.mark.parametrize("scale", [None, 3.0])
def test_a_scale_of_losses_that_is_replaced_between_steps(install: Install, scale: float | None) -> None:
    """Bug that was: where there was none, a capture's warm-up made one that no schedule could set."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    install(cuda_graph_modules=BOTH)

    def run(trainer: ExpertTrainer, is_eager: bool) -> list[Any]:
        found = []
        for index, micros in enumerate(steps_of(7)):
            if index in (3, 5):
                MoEAuxLossAutoScaler.main_loss_backward_scale = (
                    None if scale is None else torch.full((1,), scale, device=trainer.device)
                )
            found.append(expert_step(trainer, micros, eager=is_eager))
        return found

    compare_runs([ExpertTrainer() for _ in range(2)], run)
    assert set(megagraph.reports()[1]["eager"]) == {"ADDRESS_MOVED", "WARMING_UP"}


def test_metrics_that_are_watched_keep_their_memory(install: Install) -> None:
    """Bug that might be: new metrics lie where others were, and graphs add to what has another name."""
    install(cuda_graph_modules=BOTH)
    trainer = ExpertTrainer(**ROUTED["several losses"])
    for micros in steps_of(2):
        expert_step(trainer, micros)
    before = {values.data_ptr() for values in seams.moe_metrics().values()}
    moe_rig.forget_metrics()
    step(trainer, steps_of(1)[0], eager=True)
    assert before.isdisjoint(values.data_ptr() for values in seams.moe_metrics().values())


def test_metrics_of_which_a_capture_knew_nothing_begin_with_zero(install: Install) -> None:
    """Bug that might be: what the warm-up of a capture records would be in the first log."""
    from megagraph.megatron.scopes.moe import new_metrics_are_empty, read_by_routers

    trainer = ExpertTrainer(**ROUTED["several losses"])
    moe_rig.forget_metrics()
    with new_metrics_are_empty():
        expert_step(trainer, [Micro(lengths=(64,))])
        for values in seams.moe_metrics().values():
            values.add_(1)
    assert len(seams.moe_metrics()) == 4
    assert not any(values.any() for values in seams.moe_metrics().values())
    held = read_by_routers(trainer.chunk.decoder.layers[0])
    assert {id(values) for values in seams.moe_metrics().values()} < {id(tensor) for tensor in held}


# -- what goes wrong, and what is around ---------------------------------------------------------------


def test_an_error_lets_go_of_what_overlapped_shared_experts_hold(install: Install) -> None:
    install(cuda_graph_modules=BOTH)
    trainer = ExpertTrainer(**{**ROUTED["shared experts, overlapped"], "moe_shared_expert_gate": True})
    for micros in steps_of(2):
        step(trainer, micros)
    where = f"megatron.core.transformer.moe.{PLACES['dispatch']}"
    with mock.patch(where, lose), pytest.raises(OSError, match="lost"):
        step(trainer, steps_of(3)[2])
    assert tensors_of_calls(trainer) == []


@pytest.mark.parametrize("where", ["mlp", "mlp.router", "pre_mlp_layernorm"])
def test_a_hook_on_what_is_graphed_or_bypassed_keeps_its_site_eager(install: Install, where: str) -> None:
    install(cuda_graph_modules=BOTH)
    trainers = [ExpertTrainer() for _ in range(2)]
    seen: list[str] = []
    for trainer in trainers:
        module = trainer.chunk.decoder.layers[1].get_submodule(where)
        module.register_forward_hook(lambda *_: seen.append(where))
    compare_steps(trainers, steps_of(4))
    assert len(seen) == 2 * 4 * 3
    assert megagraph.reports()[1]["eager"] == {"WARMING_UP": 3 * 2, "FOREIGN_HOOK": 3 * 3}


@pytest.mark.parametrize("what", ["the layer's", "the experts'"])
def test_a_forward_that_is_not_megatrons_keeps_its_layer_whole(install: Install, what: str) -> None:
    """A router alone would pass over whatever else such a forward does."""
    install(cuda_graph_modules=BOTH)
    trainers = [ExpertTrainer() for _ in range(2)]
    for trainer in trainers:
        layer = trainer.chunk.decoder.layers[1]
        owner, name = (layer, "_forward_mlp") if what == "the layer's" else (layer.mlp, "forward")
        megatrons = getattr(owner, name)

        def doubled(*args: Any, _megatrons: Any = megatrons, **kwargs: Any) -> Any:
            out = _megatrons(*args, **kwargs)
            return out * 2 if what == "the layer's" else (out[0] * 2, out[1])

        setattr(owner, name, doubled)
    compare_steps(trainers, steps_of(4))
    report = megagraph.reports()[1]
    assert report["eager"] == {"WARMING_UP": 3 * 2, "SCOPE_UNSUPPORTED": 3 * 3}
    assert "is not Megatron's, so that its router cannot run alone" in report["failures"][0]


def test_a_hook_on_the_experts_runs_beside_the_graph(install: Install) -> None:
    install(cuda_graph_modules=BOTH)
    trainer = ExpertTrainer()
    seen: list[str] = []
    trainer.chunk.decoder.layers[1].mlp.experts.register_forward_hook(lambda *_: seen.append("experts"))
    for micros in steps_of(4):
        expert_step(trainer, micros)
    assert len(seen) == 4 * 3
    assert megagraph.reports()[0]["eager"] == {"WARMING_UP": 3 * 2}


def test_ranks_with_packs_of_their_own(worlds: Worlds) -> None:
    """No collective of a router goes over them, but that of its global loss. Fused functions are compiled."""
    for report in worlds.of(2, compiles=True).run(moe_jobs.train_pair, scopes=(*BOTH, "mlp"), **BIAS):
        assert report["eager"] == {"WARMING_UP": 3 * 2} and report["failures"] == []


def test_a_loss_that_is_reduced_over_data_parallel_ranks_keeps_its_router_eager(world2: World) -> None:
    changes = {"moe_router_load_balancing_type": "global_aux_loss"}
    for report in world2.run(moe_jobs.train_pair, scopes=(*BOTH, "mlp"), **changes):
        assert report["eager"] == {"WARMING_UP": 3 * 2, "SCOPE_UNSUPPORTED": 7 * 3}
        assert "collectives of ranks that run other packs (tp_dp_cp, 2 ranks" in report["failures"][0]


SPREAD: dict[str, Config] = {
    "dropless, bias": BIAS,
    "drop": ROUTED["drop"],
    "shared experts": ROUTED["shared experts"],
    "shared experts, overlapped": ROUTED["shared experts, overlapped"],
}


@pytest.mark.gpu
def test_a_hundred_steps_of_experts_over_ranks(world2: World) -> None:
    changes = {**BIAS, "moe_shared_expert_intermediate_size": 24}
    reports = world2.run(
        moe_jobs.train_spread, scopes=(*BOTH, "moe_preprocess", "mlp"), num_steps=100, misfits_on=1, **changes
    )
    for report in reports:
        assert report["failures"] == []
    assert reports[0]["eager"] == {"WARMING_UP": 3 * 2}
    assert reports[1]["eager"] == {"WARMING_UP": 3 * 2, "TOO_MANY_SEQUENCES": 50 * 2}


@pytest.mark.parametrize("case", SPREAD)
def test_experts_over_ranks_with_packs_of_their_own(world2: World, case: str) -> None:
    """What is in a graph holds no communicator of experts: a pack of one rank alone may fit no capacity."""
    reports = world2.run(
        moe_jobs.train_spread, scopes=(*BOTH, "mlp"), num_steps=6, misfits_on=1, **SPREAD[case]
    )
    for report in reports:
        assert report["failures"] == []
    assert reports[0]["eager"] == {"WARMING_UP": 3 * 2}
    assert reports[1]["eager"] == {"WARMING_UP": 3 * 2, "TOO_MANY_SEQUENCES": 3 * 2}
