# SPDX-License-Identifier: Apache-2.0
"""Packs that say by how many ranks they are shared, beside each scope, each kind of pass and of tail."""

import copy
import gc
from functools import partial
from typing import Any
from unittest import mock

import context_jobs
import context_models
import megatron_rig as rig
import moe_rig
import pytest
import torch
from context_jobs import STEPS, install, losses_of, micros_of, new_trainer, warmed
from torch import Tensor, distributed
from worlds import on_ranks

import megagraph
from megagraph.demo.trainer import Trainer
from megagraph.megatron import seams
from megagraph.megatron.parallel.context import ContextRanks
from megagraph.megatron.parallel.groups import COLLECTIONS
from megagraph.megatron.parallel.peers import Peers

pytestmark = pytest.mark.megatron

WITHOUT_UPDATES = {**context_models.MANY_KINDS, "moe_router_bias_update_rate": 0.0}


@pytest.mark.parametrize("model", [{}, {"mla": "low rank, YaRN"}, {"mla": "plain, RoPE"}], ids=str)
@on_ranks(2)
def test_tables_that_megatron_drops(model: dict[str, Any]) -> None:
    """Its caches are few, and another model asks for tables that are longer, between two replays."""
    install()
    make = partial(context_models.trainer, config={"calculate_per_token_loss": True}, **model)
    pair, other = rig.Pair(make), make()
    micros = micros_of(megagraph.context_groups((1, 2)).of_size(2))
    rubbish: list[Tensor] = []
    pair.step(*micros, times=2)
    for index in range(2):
        rig.evaluate(other, [rig.Micro(lengths=(65 + 40 * index + more,)) for more in range(40)])
        gc.collect()
        rubbish += [torch.full((64, 64), float("nan"), device=other.device) for _ in range(64)]
        pair.step(*micros)
    _, report, _ = megagraph.reports()
    assert set(report["eager"]) == {"WARMING_UP"}


@on_ranks(4)
def test_the_largest_groups_come_first() -> None:
    """On every rank alike: communicators of several sizes could wait for each other."""
    sizes, used, captured = (1, 2, 4), [], []
    trainer, groups = new_trainer(cp_sizes=sizes), megagraph.context_groups(sizes)
    reduce, show = distributed.all_reduce, ContextRanks.showing_size

    def note_use(tensor: Tensor, *, group: Any) -> None:
        used.append(group.size())
        reduce(tensor, group=group)

    def note_capture(ranks: ContextRanks, cp_size: int) -> Any:
        captured.append(cp_size)
        return show(ranks, cp_size)

    with mock.patch.object(distributed, "all_reduce", note_use):
        groups.warm_up(trainer.device)
    with mock.patch.object(ContextRanks, "showing_size", note_capture):
        for _ in range(STEPS):
            rig.step(trainer, micros_of(groups.of_size(2)))
    assert rig.report_of(trainer)["replays"] > 0
    assert used == [4, 2]
    # Prepared, warmed up and captured; verified after that, in sizes that every rank has met.
    assert captured[:9] == [4, 2, 1] * 3


@on_ranks(2)
def test_modules_that_change_between_steps_are_followed() -> None:
    """One that is replaced then sees the ranks of a pack; what would not see them is an error."""
    trainer = new_trainer()
    micros, seen = warmed(trainer), []
    attention: Any = trainer.chunk.decoder.layers[0].self_attention
    attention.core_attention = copy.deepcopy(attention.core_attention)
    hook = trainer.chunk.output_layer.register_forward_hook(
        lambda *_: seen.append(attention.core_attention.cp_group)
    )
    rig.step(trainer, micros)
    hook.remove()
    assert seen == [micros[0].group, None]
    trainer.chunk.config.recompute_granularity = "selective"
    with pytest.raises(ValueError, match="recompute_granularity='selective'"):
        rig.step(trainer, micros)


PLACES = ("cp_group", "tp_cp_group", "cp_global_ranks", "cp_stream")  # of modules


def sees(trainer: Trainer) -> dict[tuple[str, str], Any]:
    """What modules and metrics of routers find where they look for their ranks."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in trainer.chunk.named_modules():
        values = vars(module)
        own = {of: values[of] for of in PLACES if of in values}
        groups = {of: values[of].cp for of in COLLECTIONS if values.get(of) is not None}
        size = {"size": values["config"].context_parallel_size} if "config" in values else {}
        found |= {(name, of): value for of, value in {**own, **groups, **size}.items()}
    records = seams.moe_records()
    return found | {(name, "metric"): record.get("reduce_group") for name, record in records.items()}


@on_ranks(4)
@moe_rig.experts_on_cpu()
def test_a_capture_beside_tensor_parallelism_sees_the_ranks_that_eager_sees() -> None:
    """Bug: where packs may name the model's own ranks, graphs added up losses over others than eager.

    On a GPU; without one a replay looks for them anew.
    """
    context_jobs.start(2, 2)
    parallel = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    trainer = new_trainer(model={"experts": True}, cp_sizes=(2,), **parallel)
    peers, before = Peers(trainer.chunk, (2,)), sees(trainer)
    assert peers.context.of_size(2) is not peers.context.own_group()
    with peers.context.showing_size(2):
        assert sees(trainer) == before


@pytest.mark.parametrize(
    "model, config",
    [({}, {}), ({"mla": "plain, RoPE", "experts": True}, WITHOUT_UPDATES)],
    ids=["dense", "MLA experts"],
)
@pytest.mark.parametrize("is_inside", [False, True], ids=["behind the layers", "in a layer"])
@on_ranks(2)
@moe_rig.experts_on_cpu()
def test_an_error_leaves_every_module_as_it_was(
    model: dict[str, Any], config: dict[str, Any], is_inside: bool
) -> None:
    """While a model sees two ranks."""
    rig.forget_metrics()
    trainer = new_trainer(model=model, **config)
    shared, _ = warmed(trainer)
    expected, before = losses_of(trainer, shared), sees(trainer)
    seen: list[dict[tuple[str, str], Any]] = []

    def look_and_fail(*_args: Any) -> None:
        seen.append(sees(trainer))
        raise ArithmeticError("on purpose")

    failing = trainer.chunk.decoder.layers[1].mlp if is_inside else trainer.chunk.output_layer
    hook = failing.register_forward_hook(look_and_fail)
    with pytest.raises(ArithmeticError, match="on purpose"):
        losses_of(trainer, shared)
    hook.remove()
    assert any(value is not before[place] for place, value in seen[0].items())
    assert sees(trainer) == before
    assert torch.equal(losses_of(trainer, shared), expected)
