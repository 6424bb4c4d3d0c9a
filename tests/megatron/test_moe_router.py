# SPDX-License-Identifier: Apache-2.0
"""Routers of experts in graphs, with attention or without; dispatch, experts and combine eager."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import moe_jobs
import moe_rig
import pytest
import torch
from megatron_rig import Install, Micro, Pair, forget_metrics, report_of, step, steps_of
from moe_rig import BIAS, PLACES, ROUTED, Config, ExpertTrainer, compare, lose, tensors_of_calls
from same_bits import assert_same_bits
from worlds import World, Worlds

import megagraph
from megagraph.megatron import seams
from megagraph.megatron.scopes.moe import ROUTER

pytestmark = [
    pytest.mark.usefixtures("experts"),
    # Of shared experts that overlap, whose gradients Megatron makes on a stream of its own.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]

BOTH = ("attn", "moe_router")


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
    pair = Pair(ExpertTrainer, **ROUTED["shared experts"])
    for trainer in pair.both:
        for layer in trainer.chunk.decoder.layers:
            layer.pre_mlp_layernorm = IdentityOp()
    assert pair.train(steps_of(5))["eager"] == {"WARMING_UP": 3 * 2}


def test_steps_without_graphs_between(install: Install) -> None:
    install(cuda_graph_modules=BOTH)
    pair = Pair(ExpertTrainer, **BIAS)
    for index, micros in enumerate(steps_of(6)):
        with megagraph.disable_cuda_graphs_this_step() if index in (2, 4) else nullcontext():
            pair.step(*micros)
    assert pair.report()["eager"] == {"WARMING_UP": 3 * 2, "DISABLED": 2 * 3 * 2}


# -- state that no module owns -----------------------------------------------------------------------


def _replace_scale(device: torch.device, scale: float | None) -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = (
        None if scale is None else torch.full((1,), scale, device=device)
    )


REPLACED: dict[str, tuple[Any, Config]] = {
    # Graphs would go on adding to tensors that nobody reads.
    "metrics": (lambda device: forget_metrics(), ROUTED["several losses"]),
    # Bug that was: where there was no scale, a capture's warm-up made one that no schedule could set.
    "no scale of losses": (partial(_replace_scale, scale=None), {}),
    "a scale of losses": (partial(_replace_scale, scale=3.0), {}),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_is_replaced_between_steps_is_noticed(install: Install, what: str) -> None:
    install(cuda_graph_modules=BOTH)
    replace, changes = REPLACED[what]
    pair = Pair(ExpertTrainer, **changes)
    for index, micros in enumerate(steps_of(8)):
        if index not in (3, 6):
            pair.step(*micros)
            continue
        left = []
        for trainer in pair.both:
            replace(trainer.device)
            left.append(step(trainer, micros, eager=trainer is pair.eager))
        assert_same_bits(*left)
    eager = pair.report()["eager"]
    assert eager["ADDRESS_MOVED"] >= 3 * 2 and eager["WARMING_UP"] == 3 * 2
    assert set(eager) == {"ADDRESS_MOVED", "WARMING_UP"}


def test_metrics_that_are_watched_keep_their_memory(install: Install) -> None:
    """Bug that might be: new metrics lie where others were, and graphs add to what has another name."""
    install(cuda_graph_modules=BOTH)
    trainer = ExpertTrainer(**ROUTED["several losses"])
    for micros in steps_of(2):
        step(trainer, micros)
    before = {values.data_ptr() for values in seams.moe_metrics().values()}
    forget_metrics()
    step(trainer, steps_of(1)[0], eager=True)
    assert before.isdisjoint(values.data_ptr() for values in seams.moe_metrics().values())


def test_metrics_of_which_a_capture_knew_nothing_begin_with_zero() -> None:
    """Bug that might be: what the warm-up of a capture records would be in the first log."""
    from megagraph.megatron.scopes.moe import new_metrics_are_empty, read_by_routers

    trainer = ExpertTrainer(**ROUTED["several losses"])
    forget_metrics()
    with new_metrics_are_empty():
        step(trainer, [Micro(lengths=(64,))])
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
    pair = Pair(ExpertTrainer)
    seen: list[str] = []
    for trainer in pair.both:
        module = trainer.chunk.decoder.layers[1].get_submodule(where)
        module.register_forward_hook(lambda *_: seen.append(where))
    assert pair.train(steps_of(4))["eager"] == {"WARMING_UP": 3 * 2, "FOREIGN_HOOK": 3 * 3}
    assert len(seen) == 2 * 4 * 3


def test_a_hook_on_the_experts_runs_beside_the_graph(install: Install) -> None:
    install(cuda_graph_modules=BOTH)
    trainer = ExpertTrainer()
    seen: list[str] = []
    trainer.chunk.decoder.layers[1].mlp.experts.register_forward_hook(lambda *_: seen.append("experts"))
    for micros in steps_of(4):
        step(trainer, micros)
    assert len(seen) == 4 * 3 and report_of(trainer)["eager"] == {"WARMING_UP": 3 * 2}


def test_ranks_with_packs_of_their_own(worlds: Worlds) -> None:
    """No collective of a router goes over them, but that of its global loss. Fused functions are compiled."""
    for report in worlds.of(2, compiles=True).run(moe_jobs.train_pair, scopes=(*BOTH, "mlp"), **BIAS):
        assert report["eager"] == {"WARMING_UP": 3 * 2} and report["failures"] == []


def test_a_loss_that_is_reduced_over_data_parallel_ranks_keeps_its_router_eager(world2: World) -> None:
    changes = {"moe_router_load_balancing_type": "global_aux_loss"}
    for report in world2.run(moe_jobs.train_pair, scopes=(*BOTH, "mlp"), **changes):
        assert report["eager"] == {"WARMING_UP": 3 * 2, "SCOPE_UNSUPPORTED": 7 * 3}
        assert "collectives of ranks that run other packs (tp_dp_cp, 2 ranks" in report["failures"][0]


def check_spread(reports: list[dict[str, Any]], misfits: int) -> None:
    """What is in a graph holds no communicator of experts: a pack of one rank alone may fit no capacity."""
    assert [report["failures"] for report in reports] == [[], []]
    assert reports[0]["eager"] == {"WARMING_UP": 3 * 2}
    assert reports[1]["eager"] == {"WARMING_UP": 3 * 2, "TOO_MANY_SEQUENCES": misfits * 2}


@pytest.mark.gpu
def test_a_hundred_steps_of_experts_over_ranks(world2: World) -> None:
    scopes, changes = (*BOTH, "moe_preprocess", "mlp"), {**BIAS, "moe_shared_expert_intermediate_size": 24}
    job = moe_jobs.train_spread
    check_spread(world2.run(job, scopes=scopes, num_steps=100, misfits_on=1, **changes), 50)


SPREAD: dict[str, tuple[Sequence[str], Config]] = {
    "dropless, bias": (BOTH, BIAS),
    **{case: (BOTH, ROUTED[case]) for case in ("drop", "shared experts", "shared experts, overlapped")},
    # Counts are gathered over the ranks in the eager part.
    "permuted": (
        (*BOTH, "moe_preprocess"),
        {**BIAS, **ROUTED["shared experts"], "moe_router_load_balancing_type": "aux_loss"},
    ),
}


@pytest.mark.parametrize("case", SPREAD)
def test_experts_over_ranks_with_packs_of_their_own(world2: World, case: str) -> None:
    scopes, changes = SPREAD[case]
    if case == "permuted" and not moe_rig.can_permute(changes):
        pytest.skip("this release permutes into shapes that only the device knows")
    job = moe_jobs.train_spread
    check_spread(world2.run(job, scopes=(*scopes, "mlp"), num_steps=6, misfits_on=1, **changes), 3)
