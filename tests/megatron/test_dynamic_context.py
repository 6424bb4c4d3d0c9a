# SPDX-License-Identifier: Apache-2.0
"""Packs that each say by how many ranks they are shared: graphs of every size have the bits of eager."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import context_jobs
import megatron_rig as rig
import moe_rig
import pytest
import schedule_jobs
import torch
from context_jobs import OwnMicro, eager_calls, losses_of, micros_of, new_trainer, warmed
from context_models import EMPTY_DUMMY, MANY_KINDS, OF_ENGINE, ROUTERS
from megatron.core import parallel_state
from streams import make_groups
from torch import distributed, nn
from worlds import World, Worlds, on_ranks

import megagraph
from megagraph.decide.dispatch import PackForm, VariantKey
from megagraph.megatron.graphs.changes import Changes
from megagraph.megatron.parallel.peers import Peers

pytestmark = pytest.mark.megatron

# Over the largest entry of each gradient: sums over rows in another order; in bfloat16 on a GPU.
BOUND = 5e-2 if torch.cuda.is_available() else 2e-5
# Over the process groups of a GPU a hundred, as where ranks have one each.
STEPS = 100 if torch.cuda.is_available() else 3
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


def steps(count: int) -> list[list[list[int]]]:
    """Documents of as many steps."""
    return [LENGTHS[index % len(LENGTHS)] for index in range(count)]


def check(runs: list[dict[str, Any]], *, warm_up_steps: int = 1) -> None:
    """Every rank replays what it has warmed up, and is as far from one process as sums in another order."""
    for run in runs:
        report = run["report"]
        assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}
        assert run["off"] <= BOUND
        met = {str(size) for sizes in run["sizes"][warm_up_steps:] for size in sizes}
        for size, counts in report["cp_sizes"].items():
            assert size not in met or counts["replayed"] > 0
        # Once: what another rank has met first is not captured again where it is met later.
        found = report["verification"]
        kinds = 2 if run["evaluated"] else 1
        assert found["verified"] + found["unverified"] == kinds * run["num_sizes"]
        replayed = sum(counts.get("replayed", 0) for counts in report["cp_sizes"].values())
        found = f"{report['cp_sizes']}, {report['eager']}, of {run['sizes']}"
        assert replayed == sum(run["numbers"][warm_up_steps:]) + run["evaluated"], found


@pytest.mark.parametrize("forced", [None, 2, 4])
def test_every_size_forced_and_as_scheduled(world4: World, forced: int | None) -> None:
    lengths = steps(STEPS) if forced is None else [[[30, 7], [20], [25, 3], [16]]] * STEPS
    runs = world4.run(
        schedule_jobs.train_scheduled, lengths=lengths, cp_sizes=SIZES, forced=forced, evaluates=True
    )
    check(runs)
    sizes = {size for run in runs for of_step in run["sizes"] for size in of_step}
    assert sizes == ({*SIZES} if forced is None else {forced})
    # In one step some ranks share a pack while others have one each.
    assert forced is not None or any(
        {run["sizes"][step][place] for run in runs} >= {1, 2}
        for step in range(len(lengths))
        for place in range(runs[0]["numbers"][step])
    )


Training = tuple[int, dict[str, Any]]  # of how many ranks


def two(**options: Any) -> Training:
    return 2, {"lengths": ON_TWO, "cp_sizes": (1, 2), **options}


def four(**options: Any) -> Training:
    return 4, {"lengths": steps(3), "cp_sizes": SIZES, **options}


def scoped(*scopes: str, **options: Any) -> Training:
    return two(plugin={"cuda_graph_modules": scopes}, **options)


def beside_tensor_parallelism(sequence_parallel: bool) -> Training:
    sizes: dict[str, Any] = {"tensor_parallel": 2, "tensor_model_parallel_size": 2, "cp_sizes": (1, 2)}
    lengths = ON_TWO * (STEPS // 3)
    return four(lengths=lengths, evaluates=True, sequence_parallel=sequence_parallel, **sizes)


# Of experts: padded ones get rows that one process would give to others.
OF_EXPERTS: dict[str, Any] = {"model": {"experts": True}, "has_reference": False}
OF_PADDED = {**OF_EXPERTS, **moe_rig.CASES["drop and pad"]}
OF_GROUPED: dict[str, Any] = {"model": {"experts": True, "grouped": True}, "has_reference": False}
WITHOUT_LOSSES = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0, "moe_z_loss_coeff": None}
LOSSES = {**MANY_KINDS, "plugin": ROUTERS, "has_reference": False}
MLA: dict[str, Any] = {"model": {"mla": "plain, RoPE"}}
ADAPTED: dict[str, Any] = {"lengths": ONE_THEN_TWO, "model": {"adapters": True}}
TRAININGS: dict[str, Training] = {
    **{
        f"{kind}, beginning with packs of 2 and 4": four(
            lengths=steps(4)[1:], model={"mla": kind}, evaluates=True
        )
        for kind in ("low rank, YaRN", "plain, RoPE")
    },
    # As the config says who says how ranks share packs.
    "heads exchanged": four(cp_comm_type="a2a", num_attention_heads=4),
    "attention": scoped("attn"),
    "MLPs": scoped("mlp"),
    "halves": scoped("attn", "mlp"),
    "attention beside experts": scoped("attn", **OF_EXPERTS),
    "routers": scoped("moe_router", **OF_EXPERTS),
    "routers and what follows": scoped("attn", "moe_router", "moe_preprocess", **OF_EXPERTS),
    "routers and what follows, padded": scoped("attn", "moe_router", "moe_preprocess", **OF_PADDED),
    "experts, padded": scoped("attn", "moe", **OF_PADDED),
    "whole layers of grouped experts": scoped(**OF_GROUPED),
    "grouped experts": scoped("moe", **OF_GROUPED),
    "MLA": scoped("attn", **MLA),
    "MLPs beside MLA": scoped("mlp", **MLA),
    "adapters that are off in evaluations of other sizes": two(evaluates=True, **ADAPTED),
    "beside tensor parallelism": beside_tensor_parallelism(sequence_parallel=False),
    "beside tensor parallelism that shares rows": beside_tensor_parallelism(sequence_parallel=True),
    "fewer keys than queries": two(num_query_groups=1),
    **{
        f"{kind}, fused RoPE": two(model={"mla": kind}, apply_rope_fusion=True, evaluates=True)
        for kind in ("low rank, YaRN", "plain, YaRN")
    },
    "experts": four(model={"experts": True}, plugin=ROUTERS, evaluates=True, **WITHOUT_LOSSES),
    **{
        f"losses of routers, experts over {ranks} ranks": four(
            model={"experts": True, "mla": "low rank, YaRN"}, expert_model_parallel_size=ranks, **LOSSES
        )
        for ranks in (2, 4)
    },
    "a tail that is a document": two(plugin=EMPTY_DUMMY),
    # Without gradients, in training mode, between steps of another size.
    **{
        f"log-probabilities, {model}": two(
            lengths=ONE_THEN_TWO, model=model, evaluates=True, in_training=True
        )
        for model in ({}, {"mla": "plain, RoPE"}, {"adapters": True})
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
        for name, (model, scopes, config) in OF_ENGINE.items()
    },
}
MARKS = {
    **dict.fromkeys(("a tail that is a document", "log-probabilities, {}"), pytest.mark.both),
    **{f"Transformer Engine, {name}": [pytest.mark.gpu, rig.needs_engine] for name in OF_ENGINE},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in TRAININGS])
def test_bits(worlds: Worlds, name: str) -> None:
    ranks, options = TRAININGS[name]
    if "what follows" in name and not moe_rig.can_permute(options):
        pytest.skip("this release permutes into shapes that only the device knows")
    runs = worlds.of(ranks).run(schedule_jobs.train_scheduled, **options)
    # Modules of Transformer Engine are in another state after their first call.
    check(runs, warm_up_steps=2 if "Engine" in name else 1)
    assert {size for run in runs for of_step in run["sizes"] for size in of_step} == {*options["cp_sizes"]}
    first = {size for run in runs for size in run["sizes"][0]}
    assert "beginning" not in name or first == {2, 4}, "of which one process is asked"


@pytest.mark.parametrize("cp_sizes", [(1, 2, 4), (1, 4)])
def test_a_model_that_has_a_size_of_its_own(world4: World, cp_sizes: tuple[int, ...]) -> None:
    check(world4.run(schedule_jobs.train_scheduled, lengths=steps(3), cp_sizes=cp_sizes, static=2))


def test_capacities_are_learned_for_every_size(world2: World) -> None:
    plugin = {"cuda_graph_max_packed_seqs": (), "max_seqlen_per_dp_cp_rank": None}
    shared = [[120, 7], [60]]
    lengths = [shared, [[61], [60]], shared]  # rows that two ranks could not share between them
    one, other = world2.run(schedule_jobs.train_scheduled, lengths=lengths, cp_sizes=(1, 2), plugin=plugin)
    assert all(capacity["tokens"] % 2 == 0 for capacity in one["report"]["capacities"])
    assert one["report"]["capacities"] == other["report"]["capacities"]
    assert {capacity["cp_size"] for capacity in one["report"]["capacities"]} == {1, 2}
    for run in (one, other):
        assert run["report"]["failures"] == [] and run["report"]["replays"] > 0


def test_packs_that_fit_no_capacity_run_eager_on_their_ranks_alone(world4: World) -> None:
    plugin = {"cuda_graph_max_packed_seqs": (2,)}
    shared = [[120, 7], [60], [58], [1]]
    lengths = [shared, [[20, 20, 20], [60], [60], [60]], shared]
    runs = world4.run(schedule_jobs.train_scheduled, lengths=lengths, cp_sizes=SIZES, plugin=plugin)
    misfits = [run["report"]["eager"].get("TOO_MANY_SEQUENCES", 0) for run in runs]
    assert len(set(misfits)) > 1
    for run in runs:
        assert run["report"]["failures"] == [] and run["report"]["replays"] > 0
        assert set(run["report"]["eager"]) <= {"WARMING_UP", "TOO_MANY_SEQUENCES"}


@on_ranks(2)
def test_a_group_that_graphs_were_not_captured_with() -> None:
    trainer = new_trainer()
    shared, _ = warmed(trainer)
    losses, before = losses_of(trainer, shared), rig.report_of(trainer)
    other = dataclasses.replace(shared, group=distributed.new_group([0, 1]))
    assert torch.equal(losses_of(trainer, other), losses)
    assert eager_calls(trainer, before) == {"CP_SIZE_NOT_CAPTURED": 1}


@on_ranks(4)
def test_groups_of_a_size_are_the_same_whatever_is_asked_for_with_it() -> None:
    """Bug: packs of groups that a host had asked for with other sizes ran eager for ever."""
    trainer = new_trainer()
    groups = megagraph.context_groups(SIZES)
    for _ in range(context_jobs.STEPS):
        rig.step(trainer, micros_of(groups.of_size(2)))
    assert set(rig.report_of(trainer)["eager"]) == {"WARMING_UP"}


@on_ranks(2)
def test_groups_that_are_made_anew() -> None:
    """Bug: packs of ranks whose groups had been destroyed and made again ran eager for ever."""
    trainer = new_trainer()
    warmed(trainer)
    before = rig.report_of(trainer)
    make_groups()
    warmed(trainer)
    after = rig.report_of(trainer)
    assert after["replays"] > before["replays"] and after["failures"] == []
    assert "CP_SIZE_NOT_CAPTURED" not in after["eager"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongMicro(OwnMicro):
    """One whose pack says that a document may have all of its rows."""

    def params(self, device: torch.device) -> Any:
        params = super().params(device)
        params.max_seqlen_q = params.max_seqlen_kv = self.physical
        return params


@on_ranks(4)
def test_ranks_capture_what_others_have_met_before_they_run_any_themselves() -> None:
    """Bug: ranks whose own packs no graph took raised, and the others waited for them for ever."""
    trainer = new_trainer()
    shared, own = micros_of(megagraph.context_groups((1, 2)).of_size(2))
    is_sharing = distributed.get_rank() < 2
    micro = LongMicro(**vars(shared)) if is_sharing else own
    for _ in range(context_jobs.STEPS):
        rig.step(trainer, [micro])
    report = rig.report_of(trainer)
    assert set(report["eager"]) == {"SIGNATURE_CHANGED" if is_sharing else "WARMING_UP"}
    assert (report["replays"] == 0) == is_sharing


@contextlib.contextmanager
def hearing() -> Iterator[list[str]]:
    """Warnings of the plugin."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megagraph")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def due_on_all(peers: Peers) -> Callable[..., set[VariantKey]]:
    """Tells of some kinds, due on this rank, which ones all ranks capture."""
    return Changes(mock.Mock(), peers, mock.Mock(), 1)._due_on_all


@on_ranks(2)
def test_a_rank_that_waits_long_for_another_one_says_so_once() -> None:
    rank, peers = distributed.get_rank(), Peers(new_trainer().chunk, (1, 2))
    for due in ({KIND}, set()):
        of_all = due_on_all(peers)
        with hearing() as said:
            for _ in range(50):
                assert not of_all(due, can_capture=rank == 0, has_gradients=True)
        assert len(said) == (rank == 0 and len(due))
        waits = "a capture has waited for 20 steps: rank 1 of those that may share packs"
        assert all(waits in sentence for sentence in said)


@on_ranks(2)
def test_losses_that_are_not_per_token_are_a_warning() -> None:
    for is_per_token in (True, False):
        model = new_trainer(calculate_per_token_loss=is_per_token).chunk
        with hearing() as said:
            Peers(model, (1, 2))
        assert ["calculate_per_token_loss=False" in sentence for sentence in said] == [True] * (
            not is_per_token
        )
        megagraph.uninstall()


@on_ranks(2)
def test_a_rank_without_main_gradients_keeps_back_what_records_them_alone() -> None:
    peers, due = Peers(new_trainer().chunk, (1, 2)), {KIND, KIND.replace(grad=False)}
    found = due_on_all(peers)(due, can_capture=True, has_gradients=distributed.get_rank() == 0)
    assert sorted((kind.grad, kind.cp_size) for kind in found) == [(False, 1), (False, 2)]


@on_ranks(2)
def test_packs_may_name_the_group_that_the_model_was_built_with() -> None:
    """Bug: of two groups of the same ranks one alone was known."""
    make_groups(context_parallel_size=2)
    trainer = new_trainer(context_parallel_size=2)
    micros = micros_of(parallel_state.get_context_parallel_group())
    for _ in range(context_jobs.STEPS):
        rig.step(trainer, micros)
    assert set(rig.report_of(trainer)["eager"]) == {"WARMING_UP"}


@on_ranks(4)
def test_a_model_whose_own_ranks_are_no_neighbours_is_an_error() -> None:
    """Bug: packs that named no ranks ran eager with one group and in graphs with another."""
    make_groups(context_parallel_size=2, order="tp-dp-cp-ep-pp")
    with pytest.raises(
        ValueError, match="expected the model's own 2 context-parallel ranks to be neighbours"
    ):
        rig.step(new_trainer(), micros_of(None))


@on_ranks(4)
def test_ranks_that_destroy_a_group_alone_keep_nobody_waiting() -> None:
    """Bugs: they made it anew, which all ranks have to; others ran packs of more ranks in graphs."""
    trainer, groups = new_trainer(cp_sizes=SIZES), megagraph.context_groups(SIZES)
    shared, own = micros_of(groups.of_size(4))
    micros = [dataclasses.replace(shared, lengths=(24, 8), padded=(24, 8)), own]
    for _ in range(context_jobs.STEPS):
        rig.step(trainer, micros)
    before, destroys = rig.report_of(trainer)["replays"], distributed.get_rank() < 2
    if destroys:
        distributed.destroy_process_group(groups.of_size(2))
    for _ in range(context_jobs.STEPS):
        rig.step(trainer, micros)
    error = pytest.raises(ValueError, match="they have been destroyed")
    with error if destroys else contextlib.nullcontext():
        megagraph.context_groups(SIZES)
    report = rig.report_of(trainer)
    assert set(report["eager"]) <= {"WARMING_UP", "GROUP_DISAGREED"}
    assert report["graphs"] == 0 and report["replays"] == before


@on_ranks(2)
def test_owners_of_ranks_that_are_no_objects_of_megatrons() -> None:
    """Bug: a module of a host's whose `config` is a dictionary was an error."""
    trainer = new_trainer()
    table, spaced = nn.Identity(), nn.Identity()
    table.config = {"context_parallel_size": 1}  # type: ignore[assignment]
    spaced.config = SimpleNamespace(context_parallel_size=1)  # type: ignore[assignment]
    trainer.chunk.adapters = nn.ModuleList([table, spaced])
    micros, seen = warmed(trainer), []
    trainer.chunk.output_layer.register_forward_hook(
        lambda *_: seen.append(spaced.config.context_parallel_size)  # type: ignore[union-attr]
    )
    rig.step(trainer, micros)
    assert set(rig.report_of(trainer)["eager"]) == {"WARMING_UP"}
    assert seen == [2, 1] and spaced.config.context_parallel_size == 1


@on_ranks(2)
def test_calls_outside_of_schedules_run_eager() -> None:
    """Ranks need not make as many."""
    trainer = new_trainer()
    _, own = warmed(trainer)
    expected, before = losses_of(trainer, own), rig.report_of(trainer)
    times = 2 + distributed.get_rank()
    with torch.no_grad():
        for _ in range(times):
            losses, _ = rig.forward(trainer.model, own, trainer.device)
            mask = own.row_lists()[2].to(losses.device)
            assert torch.equal(losses.float().view(-1).where(mask > 0, 0.0), expected)
    assert eager_calls(trainer, before) == {"GROUP_DISAGREED": times}


@on_ranks(2)
def test_a_pack_without_a_slot_is_an_error() -> None:
    """Another rank that shares it may have one."""
    trainer = new_trainer()
    shared, _ = warmed(trainer)

    def twice(data: Any, model: Any) -> Any:
        micro = next(data)
        first = rig.forward(model, micro, trainer.device)  # whose backward is still to come
        return rig.forward(model, micro, trainer.device), first

    trainer.zero_grad()
    with pytest.raises(RuntimeError, match="no slot is free for a pack that 2 ranks share"):
        rig.run_schedule(trainer.model, twice, [shared], 1)


@on_ranks(2)
def test_graphs_go_before_their_groups() -> None:
    trainer = new_trainer()
    shared, _ = warmed(trainer)
    assert rig.report_of(trainer)["graphs"] == 2 * 2 * 2  # sizes, layers, both ways
    distributed.destroy_process_group(shared.group)
    assert rig.report_of(trainer)["graphs"] == 0


@on_ranks(2)
def test_a_pack_without_its_group_is_an_error() -> None:
    trainer = new_trainer()
    shared, _ = warmed(trainer)
    tokens, labels, _, positions = (rows.to(trainer.device)[None] for rows in shared.row_lists())
    given = {"input_ids": tokens, "position_ids": positions, "attention_mask": None, "labels": labels}
    for size in (4, 2):
        params = shared.params(trainer.device)
        params.local_cp_size, params.cp_group = size, None
        with pytest.raises(ValueError, match=f"expected a cp_group of local_cp_size {size}, got none"):
            trainer.model(packed_seq_params=params, **given)


EQUAL_ROWS = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"}


@pytest.mark.parametrize(
    "config, model, name",
    [
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, {}, "recompute_granularity="),
        (EQUAL_ROWS, {"experts": True}, "experts over several ranks that need equal rows"),
        (
            {"moe_router_load_balancing_type": "global_aux_loss"},
            {"experts": True},
            "routers with a global_aux_loss",
        ),
    ],
)
@on_ranks(2)
@moe_rig.experts_on_cpu()
def test_what_cannot_see_its_ranks_is_an_error(
    config: dict[str, Any], model: dict[str, Any], name: str
) -> None:
    context_jobs.start(1, expert_parallel=config.get("expert_model_parallel_size", 1))
    trainer = new_trainer(model=model, **config)
    message = "cp_sizes: expected a model that can run packs of several.*" + name
    with pytest.raises(ValueError, match=message):
        rig.step(trainer, micros_of(megagraph.context_groups((1, 2)).of_size(2)))
