# SPDX-License-Identifier: Apache-2.0
"""Packs that each say by how many ranks they are shared: graphs of every size have the bits of eager."""

import contextlib
import copy
import dataclasses
import gc
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import context_jobs
import megatron_rig as rig
import moe_rig
import pytest
import torch
from context_jobs import BOUND
from megatron.core import parallel_state
from notes import noting
from parallel_jobs import hearing
from same_bits import assert_same_bits
from streams import make_groups
from torch import distributed, nn
from worlds import World, Worlds, on_ranks

import megagraph
from megagraph._C import PackForm, VariantKey
from megagraph.demo.trainer import Trainer
from megagraph.megatron import seams
from megagraph.megatron.graphs.changes import Changes
from megagraph.megatron.parallel.context import ContextRanks
from megagraph.megatron.parallel.groups import COLLECTIONS
from megagraph.megatron.parallel.peers import Peers

SIZES = (1, 2, 4)
KIND = VariantKey(None, PackForm(False, False, None), grad=True)
# By step and rank. Documents that need four ranks, two, and one; and all three in one micro-batch.
LENGTHS = [
    [[120, 7], [60], [58, 3], [1]],
    [[], [250, 30, 31], [], [5, 6, 7, 8, 9]],
    [[120], [60], [], [60]],
    [[9, 9], [100, 4], [33], [128]],
]
# Of two ranks: documents for both in the first and the last step, one for each in the second.
ON_TWO = [[[120, 7], [60]], [[60], [60]], [[9, 80], [30]]]
ONE_THEN_TWO = [[[60], [60]], *[[[120, 7], [60]]] * 2]  # a document for each first
Training = tuple[int, dict[str, Any]]  # of how many ranks
PLACES = ("cp_group", "tp_cp_group", "cp_global_ranks", "cp_stream")  # of modules


def two(**options: Any) -> Training:
    return 2, {"lengths": ON_TWO, "cp_sizes": (1, 2), **options}


def four(**options: Any) -> Training:
    return 4, {"lengths": LENGTHS[:3], "cp_sizes": SIZES, **options}


def scoped(*scopes: str, **options: Any) -> Training:
    return two(plugin={"cuda_graph_modules": scopes}, **options)


# Of experts: padded ones get rows that one process would give to others.
EXPERTS, EQUAL_ROWS = {"experts": True}, {"expert_model_parallel_size": 2, **moe_rig.GATHERS}
OF_EXPERTS: dict[str, Any] = {"model": EXPERTS, "has_reference": False}
WITHOUT_LOSSES = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0, "moe_z_loss_coeff": None}
TRAININGS: dict[str, Training] = {
    "some ranks share a pack while others have their own": four(evaluates=True),
    "MLA, beginning with packs of 2 and 4": four(lengths=LENGTHS[1:], model={"mla": "low rank, RoPE"}),
    "a size of the model's own": four(cp_sizes=(1, 4), static=2),
    "MLPs": scoped("mlp"),
    "attention of MLA": scoped("attn", model={"mla": "plain, RoPE"}),
    "routers and what follows": scoped("attn", "moe_router", "moe_preprocess", **OF_EXPERTS),
    "experts, padded": scoped("attn", "moe", **OF_EXPERTS, **moe_rig.CASES["drop and pad"]),
    "whole layers of grouped experts": two(model={"experts": True, "is_grouped": True}, has_reference=False),
    "MLA, fused RoPE": two(model={"mla": "low rank, YaRN"}, apply_rope_fusion=True, evaluates=True),
    "experts": two(model={"experts": True}, plugin=context_jobs.ROUTERS, evaluates=True, **WITHOUT_LOSSES),
    "losses of routers": two(
        model={"experts": True, "mla": "plain, RoPE"},
        plugin=context_jobs.ROUTERS,
        has_reference=False,
        expert_model_parallel_size=2,
        **context_jobs.MANY_KINDS,
    ),
    "a tail that is a document": two(plugin=context_jobs.EMPTY_DUMMY),
    # Without gradients, in training mode, between steps of another size.
    **{
        f"log-probabilities, {model}": two(
            lengths=ONE_THEN_TWO, model=model, evaluates=True, in_training=True
        )
        for model in ({}, {"adapters": True})
    },
    **{
        f"Transformer Engine, {name}": two(
            lengths=ON_TWO * 2,
            model={"engine": True, **model},
            plugin=scopes,
            evaluates=True,
            has_reference="experts" not in model,
            **config,
        )
        for name, (model, scopes, config) in context_jobs.OF_ENGINE.items()
    },
}
MARKS = {
    **dict.fromkeys(("a tail that is a document", "log-probabilities, {}"), pytest.mark.both),
    **{f"Transformer Engine, {name}": [pytest.mark.gpu, rig.needs_engine] for name in context_jobs.OF_ENGINE},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in TRAININGS])
def test_bits(worlds: Worlds, name: str) -> None:
    """Every rank replays what it has warmed up, and is as far from one process as sums in another order."""
    ranks, options = TRAININGS[name]
    if "what follows" in name and not moe_rig.can_permute(options):
        pytest.skip("this release permutes into shapes that only the device knows")
    runs = worlds.of(ranks).run(context_jobs.train_scheduled, **options)
    # Modules of Transformer Engine are in another state after their first call.
    warm_up_steps = 2 if "Engine" in name else 1
    for run in runs:
        report, replayable = run["report"], run["sizes"][warm_up_steps:]
        assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}
        assert run["off"] <= BOUND
        replayed = {size: counts.get("replayed", 0) for size, counts in report["cp_sizes"].items()}
        assert all(replayed.get(str(size), 1) for sizes in replayable for size in sizes)
        # Once: what another rank has met first is not captured again where it is met later.
        found = report["verification"]
        assert found["verified"] + found["unverified"] == (2 if run["evaluated"] else 1) * run["num_sizes"]
        assert sum(replayed.values()) == sum(map(len, replayable)) + run["evaluated"], report
    assert {size for run in runs for of_step in run["sizes"] for size in of_step} == {*options["cp_sizes"]}
    of_steps = zip(*(run["sizes"] for run in runs), strict=True)
    sizes = [[*zip(*of_ranks, strict=True)] for of_ranks in of_steps]
    assert "beginning" not in name or {2, 4} == {size for at_once in sizes[0] for size in at_once}
    assert "others" not in name or any({1, 2} <= {*at_once} for of_step in sizes for at_once in of_step)


def test_capacities_are_learned_for_every_size(world2: World) -> None:
    plugin = {"cuda_graph_max_packed_seqs": (), "max_seqlen_per_dp_cp_rank": None}
    shared = [[120, 7], [60]]
    lengths = [shared, [[61], [60]], shared]  # rows that two ranks could not share between them
    one, other = world2.run(context_jobs.train_scheduled, lengths=lengths, cp_sizes=(1, 2), plugin=plugin)
    assert all(capacity["tokens"] % 2 == 0 for capacity in one["report"]["capacities"])
    assert one["report"]["capacities"] == other["report"]["capacities"]
    assert {capacity["cp_size"] for capacity in one["report"]["capacities"]} == {1, 2}
    for run in (one, other):
        assert run["report"]["failures"] == [] and run["report"]["replays"] > 0


@on_ranks(2)
def test_packs_that_no_graph_takes() -> None:
    """Of another group; outside of schedules; without their group; without a slot on any rank."""
    trainer = context_jobs.new_trainer()
    shared, own = context_jobs.warmed(trainer)
    losses, before = context_jobs.losses_of(trainer, shared), rig.report_of(trainer)
    other = dataclasses.replace(shared, group=distributed.new_group([0, 1]))
    assert_same_bits(context_jobs.losses_of(trainer, other), losses)
    assert rig.eager_since(rig.report_of(trainer), before) == {"CP_SIZE_NOT_CAPTURED": rig.LAYERS}

    expected, before = context_jobs.losses_of(trainer, own), rig.report_of(trainer)
    times = 2 + distributed.get_rank()
    with torch.no_grad():
        for _ in range(times):
            given, _ = rig.forward(trainer.model, own, trainer.device)
            mask = own.row_lists()[2].to(given.device)
            assert torch.equal(given.float().view(-1).where(mask > 0, 0.0), expected)
    assert rig.eager_since(rig.report_of(trainer), before) == {"GROUP_DISAGREED": times * rig.LAYERS}

    for size in (4, 2, 0):
        nobodys = dataclasses.replace(shared, said={"local_cp_size": size, "cp_group": None})
        with pytest.raises(ValueError, match=f"expected a cp_group of local_cp_size {size}, got none"):
            rig.forward(trainer.model, nobodys, trainer.device)

    held: list[Any] = []

    def twice(data: Any, model: Any) -> Any:
        micro = next(data)
        held.append(rig.forward(model, micro, trainer.device))  # whose backward is still to come
        return rig.forward(model, micro, trainer.device)

    trainer.zero_grad()
    before = rig.report_of(trainer)
    rig.run_schedule(trainer.model, twice, [shared], 1)
    assert rig.eager_since(rig.report_of(trainer), before) == {"NO_FREE_SLOT": rig.LAYERS}


@on_ranks(2)
def test_graphs_go_before_their_groups_and_come_again_with_others() -> None:
    """Bug: packs of ranks whose groups had been destroyed and made again ran eager for ever."""
    trainer = context_jobs.new_trainer()
    context_jobs.warmed(trainer)
    before = rig.report_of(trainer)
    make_groups()
    shared, _ = context_jobs.warmed(trainer)
    after = rig.report_of(trainer)
    assert after["replays"] > before["replays"] and after["failures"] == []
    assert "CP_SIZE_NOT_CAPTURED" not in after["eager"]
    assert after["graphs"] == 2 * 2 * 2  # sizes, layers, both ways
    distributed.destroy_process_group(shared.group)
    assert rig.report_of(trainer)["graphs"] == 0


@on_ranks(4)
def test_ranks_capture_what_others_have_met_before_they_run_any_themselves() -> None:
    """Bug: ranks whose own packs no graph took raised, and the others waited for them for ever."""
    trainer = context_jobs.new_trainer()
    shared, own = context_jobs.micros_of(megagraph.context_groups((1, 2)).of_size(2))
    is_sharing = distributed.get_rank() < 2
    # Says that a document may have all of its rows.
    said = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), shared.physical)
    micro = dataclasses.replace(shared, said=said) if is_sharing else own
    rig.step(trainer, [micro], times=context_jobs.STEPS)
    report = rig.report_of(trainer)
    assert set(report["eager"]) == {"SIGNATURE_CHANGED" if is_sharing else "WARMING_UP"}
    assert (report["replays"] == 0) == is_sharing


@on_ranks(2)
def test_what_is_due_on_one_rank_waits_for_the_others() -> None:
    """One that waits long says so once. One without main gradients keeps back what records them alone."""
    rank, peers = distributed.get_rank(), Peers(context_jobs.new_trainer().chunk, (1, 2))
    due_on_all = lambda: Changes(mock.Mock(), peers, mock.Mock(), 1)._due_on_all  # noqa: E731
    for due in ({KIND}, set()):
        of_all = due_on_all()
        with hearing(logging.WARNING) as said:
            for _ in range(50):
                assert not of_all(due, can_capture=rank == 0, has_gradients=True)
        assert len(said) == (rank == 0 and len(due))
        waits = "a capture has waited for 20 steps: rank 1 of those that may share packs"
        assert all(waits in sentence for sentence in said)
    due = {KIND, KIND.replace(grad=False)}
    found = due_on_all()(due, can_capture=True, has_gradients=rank == 0)
    assert sorted((kind.grad, kind.cp_size) for kind in found) == [(False, 1), (False, 2)]


@on_ranks(2)
def test_losses_that_are_not_per_token_are_a_warning() -> None:
    for is_per_token in (True, False):
        model = context_jobs.new_trainer(calculate_per_token_loss=is_per_token).chunk
        with hearing(logging.WARNING) as said:
            Peers(model, (1, 2))
        assert ["calculate_per_token_loss=False" in it for it in said] == [True] * (not is_per_token)
        megagraph.uninstall()


@on_ranks(2)
def test_packs_may_name_the_group_that_the_model_was_built_with() -> None:
    """Bug: of two groups of the same ranks one alone was known."""
    make_groups(context_parallel_size=2)
    trainer = context_jobs.new_trainer(context_parallel_size=2)
    for group in (parallel_state.get_context_parallel_group(), megagraph.context_groups((1, 2)).of_size(2)):
        rig.step(trainer, context_jobs.micros_of(group), times=context_jobs.STEPS)
    assert set(rig.report_of(trainer)["eager"]) == {"WARMING_UP"}


@on_ranks(4)
def test_a_model_whose_own_ranks_are_no_neighbours_is_an_error() -> None:
    """Bug: packs that named no ranks ran eager with one group and in graphs with another."""
    make_groups(context_parallel_size=2, order="tp-dp-cp-ep-pp")
    with pytest.raises(
        ValueError, match="expected the model's own 2 context-parallel ranks to be neighbours"
    ):
        rig.step(context_jobs.new_trainer(), context_jobs.micros_of(None))


@on_ranks(4)
def test_ranks_that_destroy_a_group_alone_keep_nobody_waiting() -> None:
    """Bugs: they made it anew, which all ranks have to; others ran packs of more ranks in graphs."""
    trainer, groups = context_jobs.new_trainer(cp_sizes=SIZES), megagraph.context_groups(SIZES)
    shared, own = context_jobs.micros_of(groups.of_size(4))
    micros = [dataclasses.replace(shared, lengths=(24, 8), padded=(24, 8)), own]
    rig.step(trainer, micros, times=context_jobs.STEPS)
    before, destroys = rig.report_of(trainer)["replays"], distributed.get_rank() < 2
    if destroys:
        distributed.destroy_process_group(groups.of_size(2))
    rig.step(trainer, micros, times=context_jobs.STEPS)
    error = pytest.raises(ValueError, match="they have been destroyed")
    with error if destroys else contextlib.nullcontext():
        megagraph.context_groups(SIZES)
    report = rig.report_of(trainer)
    assert set(report["eager"]) <= {"WARMING_UP", "GROUP_DISAGREED"}
    assert report["graphs"] == 0 and report["replays"] == before


@on_ranks(2)
def test_modules_that_look_for_their_ranks_see_those_of_a_pack() -> None:
    """And one that is replaced. Bug: a module of a host's whose `config` is a dictionary was an error."""
    trainer = context_jobs.new_trainer()
    table, spaced = nn.Identity(), nn.Identity()
    table.config = {"context_parallel_size": 1}
    spaced.config = SimpleNamespace(context_parallel_size=1)
    trainer.chunk.adapters = nn.ModuleList([table, spaced])
    micros, seen, group = context_jobs.warmed(trainer), [], megagraph.context_groups((1, 2)).of_size(2)
    attention: Any = trainer.chunk.decoder.layers[0].self_attention
    looks = lambda *_: (spaced.config.context_parallel_size, attention.core_attention.cp_group)  # noqa: E731
    trainer.chunk.output_layer.register_forward_hook(lambda *_: seen.append(looks()))
    rig.step(trainer, micros)
    assert set(rig.report_of(trainer)["eager"]) == {"WARMING_UP"}
    attention.core_attention = copy.deepcopy(attention.core_attention)
    rig.step(trainer, micros)
    assert seen == [(2, group), (1, None)] * 2 and spaced.config.context_parallel_size == 1
    trainer.chunk.config.recompute_granularity = "selective"
    with pytest.raises(ValueError, match="recompute_granularity='selective'"):
        rig.step(trainer, micros)


@pytest.mark.parametrize(
    "config, model, name",
    [
        (moe_rig.recompute("mlp"), {}, "recompute_granularity="),
        (EQUAL_ROWS, EXPERTS, "experts over several ranks that need equal rows"),
        ({"moe_router_load_balancing_type": "global_aux_loss"}, EXPERTS, "routers with a global_aux_loss"),
    ],
)
@on_ranks(2)
def test_what_cannot_see_its_ranks_is_an_error(config: Any, model: Any, name: str) -> None:
    context_jobs.start(1, expert_parallel=config.get("expert_model_parallel_size", 1))
    trainer = context_jobs.new_trainer(model=model, **config)
    with pytest.raises(ValueError, match=f"cp_sizes: expected a model that can run packs of several.*{name}"):
        rig.step(trainer, context_jobs.micros_of(megagraph.context_groups((1, 2)).of_size(2)))


# -- what a model sees of the ranks -----------------------------------------------------------------


@on_ranks(2)
def test_tables_that_megatron_drops() -> None:
    """Its caches hold 32, and another model asks for tables that are longer, between two replays."""
    context_jobs.install()
    make = partial(context_jobs.make_trainer, config={"calculate_per_token_loss": True}, mla="low rank, YaRN")
    pair, other = rig.Pair(make), make()
    micros = context_jobs.micros_of(megagraph.context_groups((1, 2)).of_size(2))
    pair.step(*micros, times=2)
    rig.evaluate(other, [rig.Micro(lengths=(65 + more,)) for more in range(33)])
    gc.collect()
    rubbish = [torch.full((64, 64), float("nan"), device=other.device) for _ in range(64)]
    pair.step(*micros)
    assert len(rubbish) == 64  # alive
    _, report, _ = megagraph.reports()
    assert set(report["eager"]) == {"WARMING_UP"}


@on_ranks(4)
def test_the_largest_groups_come_first() -> None:
    """Or communicators could wait for each other. Bug: those asked for with other sizes ran eager."""
    trainer, groups = context_jobs.new_trainer(cp_sizes=SIZES), megagraph.context_groups(SIZES)
    of_others = megagraph.context_groups((1, 2))
    with pytest.MonkeyPatch.context() as patch:
        used = noting(patch, distributed, "all_reduce", lambda _tensor, group: group.size())
        groups.warm_up(trainer.device)
    with pytest.MonkeyPatch.context() as patch:
        captured = noting(patch, ContextRanks, "showing_size", lambda _ranks, cp_size: cp_size)
        rig.step(trainer, context_jobs.micros_of(of_others.of_size(2)), times=context_jobs.STEPS)
    report = rig.report_of(trainer)
    assert set(report["eager"]) == {"WARMING_UP"} and report["replays"] > 0
    assert used == [4, 2]
    # Prepared, warmed up and captured; verified after that, in sizes that every rank has met.
    assert captured[:9] == [4, 2, 1] * 3


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
def test_a_capture_beside_tensor_parallelism_sees_the_ranks_that_eager_sees() -> None:
    """Bug: where packs may name the model's own ranks, graphs on a GPU added up losses over others."""
    context_jobs.start(2, 2)
    parallel = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    trainer = context_jobs.new_trainer(model={"experts": True}, cp_sizes=(2,), **parallel)
    peers, before = Peers(trainer.chunk, (2,)), sees(trainer)
    assert peers.context.of_size(2) is not peers.context.own_group
    with peers.context.showing_size(2):
        assert sees(trainer) == before


@on_ranks(2)
def test_an_error_leaves_every_module_as_it_was() -> None:
    """In a layer or behind them, while a model sees two ranks."""
    rig.forget_metrics()
    without_updates = {**context_jobs.MANY_KINDS, "moe_router_bias_update_rate": 0.0}
    trainer = context_jobs.new_trainer(model={"mla": "plain, RoPE", "experts": True}, **without_updates)
    shared, _ = context_jobs.warmed(trainer)
    expected, before = context_jobs.losses_of(trainer, shared), sees(trainer)
    seen: list[dict[tuple[str, str], Any]] = []

    def look_and_fail(*_args: Any) -> None:
        seen.append(sees(trainer))
        raise ArithmeticError("on purpose")

    for failing in (trainer.chunk.decoder.layers[1].mlp, trainer.chunk.output_layer):
        with failing.register_forward_hook(look_and_fail), pytest.raises(ArithmeticError, match="on purpose"):
            context_jobs.losses_of(trainer, shared)
        assert any(value is not before[place] for place, value in seen.pop().items())
        assert sees(trainer) == before
        assert_same_bits(context_jobs.losses_of(trainer, shared), expected)
