# SPDX-License-Identifier: Apache-2.0
"""Pipelines have the bits of eager in every stage and chunk: on ranks, and of any stage in one process."""

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import megatron_rig as rig
import moe_rig
import pipeline_jobs
import pytest
import torch
from megatron.core import __version__
from megatron.core.transformer.transformer_block import TransformerBlock
from model_specs import mla_config
from pipeline_jobs import LATE, OF_ENGINE
from torch import distributed
from worlds import World, Worlds, on_ranks

import megagraph
from benchmarks.subjects.pipelines import Cut, alone
from megagraph._C import StageSchedule
from megagraph.cli.reports import read_report

OF_TWO_CHUNKS, OF_EXPERTS = Cut(chunks=2), Cut(chunks=2, expert_parallel=2)
# Sharded over the ranks of a stage, and gathered while chunks run.
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 2000}
SHARDED = {**BUCKETS, "use_distributed_optimizer": True, "overlap_param_gather": True}
EXPERTS = {"transformer": moe_rig.BASE, "plugin": {"cuda_graph_modules": ("attn", "moe_router")}}
BEHIND_DENSE = {**EXPERTS, "transformer": {**moe_rig.BASE, "moe_layer_freq": [0, 1]}}
OVERLAPS = {**moe_rig.BASE, "moe_z_loss_coeff": None, "overlap_moe_expert_parallel_comm": True}
OVERLAPPED = {**EXPERTS, "transformer": OVERLAPS, "masks": True}
ENGINES = {"normalization": "RMSNorm", "moe_grouped_gemm": True}
DELAYED = {**OVERLAPPED, "ddp": {"delay_wgrad_compute": True}}
DELAYED_OF_ENGINE = {**DELAYED, "kind": OF_ENGINE, "transformer": {**OVERLAPS, **ENGINES}}
ON_ENGINE = [pytest.mark.gpu, rig.needs_engine]
Make = Callable[..., pipeline_jobs.Pair]
Training = tuple[int, dict[str, Any]]  # of how many ranks


def on(ranks: int, cut: Cut = OF_TWO_CHUNKS, **options: Any) -> Training:
    return ranks, {"cut": cut, **options}


UNEVEN = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}
EMPTIED = {"transformer": {"deallocate_pipeline_outputs": True}}
both = pytest.mark.both
TRAININGS: dict[str, tuple[Any, Training]] = {
    # With packs that fill their capacity, whose output the schedule keeps over the next forward.
    "2 stages, outputs emptied once they are sent": (both, on(2, Cut(), **EMPTIED)),
    "2 stages of 2 chunks, outputs emptied once they are sent": (both, on(2, **EMPTIED)),
    "2 stages of 2 chunks, groups of 3": ((), on(2, Cut(chunks=2, group_size=3), num_steps=3, most=6)),
    "MLA": ((), on(2, Cut(), transformer=mla_config("low rank, RoPE"))),
    "two data-parallel ranks a stage": (both, on(4, Cut(), ddp=SHARDED)),
    "two data-parallel ranks a stage, aligned": ((), on(4, OF_TWO_CHUNKS, ddp=SHARDED, aligned=True)),
    # The exchange of rows between experts' ranks is not in graphs.
    "experts that ranks of a stage share": (both, on(4, Cut(expert_parallel=2), **EXPERTS)),
    # Bug: a stage without experts was refused, as if its layers were of a foreign kind.
    "experts behind a stage of dense layers": (both, on(4, Cut(expert_parallel=2), **BEHIND_DENSE)),
    "experts whose exchange overlaps": (both, on(4, OF_EXPERTS, **OVERLAPPED)),
    "late gradients": ((), on(4, OF_EXPERTS, kind=LATE, **DELAYED)),
    "late gradients of Transformer Engine's layers": (ON_ENGINE, on(4, OF_EXPERTS, **DELAYED_OF_ENGINE)),
    "packs that ranks of a stage share": (both, on(4, Cut(context_parallel=2))),
    # Some micro-batches are shared by both ranks of a stage, and others by none.
    "packs of several sizes in flight": (both, on(4, OF_TWO_CHUNKS, cp_sizes=(1, 2))),
    "two tensor-parallel ranks a stage": (both, on(4, Cut(tensor_parallel=2))),
    "packs of as many rows": ((), on(2, transformer={"variable_seq_lengths": False})),
    "stages of one layer and of three, whose embeddings are shared": (
        (),
        on(2, Cut(), layers=2, transformer=UNEVEN, shared_embeddings=True),
    ),
}


def check(reports: list[list[dict[str, Any]]]) -> None:
    """Of each rank and chunk: only the first step and evaluation ran eager, and slots are what is needed."""
    for report in itertools.chain(*reports):
        rig.ran(report, WARMING_UP=report["first"] * report["layers"])
        assert report["most_in_flight"] == report["slots"] == report["schedule"]
        assert report["verification"]["verified"] > 0


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, (marks, _) in TRAININGS.items()])
def test_bits(worlds: Worlds, name: str) -> None:
    ranks, options = TRAININGS[name][1]
    frees_after_sending = tuple(map(int, __version__.split(".")[:2])) >= (0, 19)
    if "emptied" in name and options["cut"].chunks > 1 and not frees_after_sending:
        pytest.skip("this release frees what it still sends: eager differs from run to run")
    reports = worlds.of(ranks).run(pipeline_jobs.train_pair, **options)
    check(reports)
    for report in itertools.chain(*reports):
        assert all(report["cp_sizes"][str(size)]["replayed"] for size in options.get("cp_sizes", ()))


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        pytest.param(0, LATE, marks=both),
        *(pytest.param(stage, "core", marks=pytest.mark.soak) for stage in range(4)),
        *(pytest.param(stage, LATE, marks=pytest.mark.soak) for stage in (1, 2, 3)),
        *(pytest.param(stage, OF_ENGINE, marks=ON_ENGINE) for stage in range(4)),
    ],
)
def test_any_stage_whose_exchange_of_rows_overlaps(world2: World, stage: int, kind: str) -> None:
    """Of four, which two ranks run without the others: forwards, backwards, and late gradients."""
    config = {**OVERLAPS, **(ENGINES if kind == OF_ENGINE else {}), "variable_seq_lengths": False}
    given = {**OVERLAPPED, "transformer": config, "ddp": {"delay_wgrad_compute": kind != "core"}}
    given |= {"cut": Cut(stages=4, chunks=2, expert_parallel=2), "stage": stage, "kind": kind}
    check(world2.run(pipeline_jobs.train_alone, layers=2, most=8, evaluate_at=(1,), **given))


@on_ranks(2)
def test_eager_is_what_megatron_does_without_the_plugin() -> None:
    """Beside it, in mode `eager`, on full packs."""
    model = OF_TWO_CHUNKS
    model.start()
    options = dataclasses.replace(rig.OPTIONS, layers=model.stages * model.chunks, heads=4)
    micros = [rig.Micro(lengths=(n, rig.CAPACITY.tokens - n), seed=n) for n in range(20, 26)]
    plain = pipeline_jobs.Trainer(model, options, ddp={}).train(micros, eager=False)
    megagraph.install(rig.graph_config(mode="eager"))
    ours = pipeline_jobs.Trainer(model, options, ddp={}).train(micros, eager=False)
    torch.testing.assert_close([plain.losses, plain.grads], [ours.losses, ours.grads])
    distributed.barrier()  # a stage that is done must not close what another still sends over


@pytest.mark.parametrize("training", [on(2), TRAININGS["experts whose exchange overlaps"][1]])
def test_packs_that_fit_no_capacity_run_eager_and_the_others_replay(worlds: Worlds, training: Any) -> None:
    ranks, options = training
    for rank, reports in enumerate(worlds.of(ranks).run(pipeline_jobs.train_pair, misfits=True, **options)):
        for report in reports:
            misfits = {} if ranks == 4 and rank % 2 == 0 else {"TOO_MANY_SEQUENCES": 2}
            rig.ran(report, WARMING_UP=report["first"], **misfits)


@pytest.mark.parametrize("slots", [1, 9])
def test_a_number_of_slots_is_the_most_that_a_chunk_gets(world2: World, slots: int) -> None:
    reports = world2.run(pipeline_jobs.train_pair, cut=OF_TWO_CHUNKS, plugin={"cuda_graph_slots": slots})
    for report in itertools.chain(*reports):
        assert report["slots"] == report["most_in_flight"] == min(slots, report["schedule"])
        assert set(report["eager"]) == {"WARMING_UP", *["NO_FREE_SLOT"] * (slots < report["schedule"])}


def test_a_stage_without_layers_is_left_alone(world2: World) -> None:
    """Bug: its first forward raised."""
    layout = {"pipeline_model_parallel_layout": [["embedding"], ["decoder", "decoder", "loss"]]}
    without, other = world2.run(pipeline_jobs.train_pair, cut=Cut(), transformer=layout)
    assert without == []
    check([other])


def test_rows_that_tensor_parallel_ranks_share(world4: World) -> None:
    """Sequence parallelism: a pack below its capacity would get rows that the other stage does not expect."""
    cut, further = Cut(tensor_parallel=2), {"sequence_parallel": True}
    for (report,) in world4.run(pipeline_jobs.train_pair, cut=cut, transformer=further, even=True):
        assert set(report["eager"]) == {"WARMING_UP", "SIGNATURE_CHANGED"} and report["replays"] > 0


def test_every_chunk_is_in_the_report_and_one_rank_a_stage_in_the_log(world4: World, tmp_path: Path) -> None:
    """Two data-parallel ranks a stage; rank 0 alone did speak."""
    report = tmp_path / "run.json"
    said = world4.run(pipeline_jobs.speak, cut=OF_TWO_CHUNKS, report=str(report))
    names = [f"GPTModel (stage {stage}, chunk {chunk})" for stage in range(2) for chunk in range(2)]
    # Each is there twice: eager, and graphed.
    assert [model["model"] for model in read_report(report)] == [
        *(f"{name}{number}" for stage in (0, 2) for number in ("", " #2") for name in names[stage:][:2])
    ]
    assert len(list(tmp_path.iterdir())) == 2
    speaking = [[name for name in names if any(name in line for line in lines)] for lines in said]
    assert sorted(speaking) == [[], [], names[:2], names[2:]]


# -- any stage in one process ----------------------------------------------------------------------


def schedules(stages: int, chunks: int, *of: int) -> list[StageSchedule]:
    return [StageSchedule(stages=stages, stage=stage, chunks=chunks) for stage in of or range(stages)]


SCHEDULES = [*schedules(4, 1, 0, 1, 3), *schedules(4, 2, 0, 2), *schedules(4, 3, 1)]
OTHERS = [*schedules(4, 1, 2), *schedules(4, 2, 1, 3), *schedules(8, 4)]


def packs(count: int, seed: int) -> list[rig.Micro]:
    lengths = (pipeline_jobs.SHAPES[(place + seed) % len(pipeline_jobs.SHAPES)] for place in range(count))
    return [rig.Micro(lengths=each, seed=100 * seed + place) for place, each in enumerate(lengths)]


@pytest.fixture
def stage(install: rig.Install) -> Iterator[Make]:
    """Makes a pair of a stage without the others, with the plugin installed."""
    install()
    with contextlib.ExitStack() as stack:

        def make(schedule: StageSchedule, *, deallocates: bool = False) -> pipeline_jobs.Pair:
            cut = Cut(stages=schedule.stages, chunks=schedule.chunks)
            options = dataclasses.replace(rig.OPTIONS, layers=schedule.stages * schedule.chunks)
            how: dict[str, Any] = {"transformer": {"deallocate_pipeline_outputs": deallocates}, "ddp": {}}
            others = stack.enter_context(alone(cut, schedule.stage))
            pair = pipeline_jobs.Pair(cut, options, others=others, **how)
            for trainer in pair.both:  # or weights would soon be infinite: what others send is random
                trainer.update = lambda: None
            # As a host may call a chunk that begins with the hidden states of another stage.
            for trainer in pair.both if deallocates else ():
                for model, chunk in zip(trainer.models, trainer.chunks, strict=True):
                    if not model.pre_process:
                        rig.hands(chunk, lambda given: {**given, "input_ids": None, "position_ids": None})
            return pair

        yield make


def check_reports(pair: pipeline_jobs.Pair, warm_up: int) -> None:
    """All but some micro-batches replayed, in as many slots as there must be."""
    check([[report | {"first": warm_up} for report in pair.reports()]])


def counts(schedule: StageSchedule) -> Sequence[int]:
    """Few, and as many as it takes to have the most in flight."""
    group = schedule.stages if schedule.chunks > 1 else 1
    return (group, 2 * group + schedule.stages)


@pytest.mark.parametrize(
    ("schedule", "deallocates"),
    [
        (SCHEDULES[1], False),
        *((it, True) for it in SCHEDULES),
        *(pytest.param(it, True, marks=pytest.mark.soak) for it in OTHERS),
    ],
)
def test_bits_of_a_stage_alone(stage: Make, schedule: StageSchedule, deallocates: bool) -> None:
    pair = stage(schedule, deallocates=deallocates)
    for seed, count in enumerate(counts(schedule)):
        pair.step(packs(count, seed))
        pair.step(packs(counts(schedule)[0], seed), forward_only=True)
    check_reports(pair, warm_up=2 * counts(schedule)[0])


def test_a_step_that_raises_anywhere_leaves_no_slot_held(stage: Make) -> None:
    """In the warm-up, in the steady state, in the cool-down; before a forward, and before a backward."""
    schedule = StageSchedule(stages=4, stage=1, chunks=2)
    pair = stage(schedule)
    pair.step(packs(8, 0))
    are_forward = [is_forward for is_forward, _chunk, _micro_batch in schedule.passes(8)]
    first_backward = are_forward.index(False)
    last_forward = max(place for place, is_forward in enumerate(are_forward) if is_forward)
    for seed, stop in enumerate((1, first_backward - 1, first_backward, last_forward, last_forward + 2), 2):

        def raise_there(number: int, stop: int = stop) -> None:
            if number == stop:
                raise OSError("lost")

        pair.eager.others.at_message = raise_there
        with pytest.raises(OSError, match="lost"):
            pair.graphed.train(packs(8, seed), eager=False)
        pair.eager.others.at_message = lambda number: None
        pair.step(packs(8, seed))
    check_reports(pair, warm_up=8)


def test_an_output_that_somebody_keeps_holds_no_slot(stage: Make) -> None:
    """What a stage hands on is a copy, also where the pack fills its capacity."""
    pair = stage(StageSchedule(stages=2))
    kept = []
    with pair.graphed.models[0].register_forward_hook(lambda _model, _args, out: kept.append(out)):
        for seed in range(4):
            pair.step(packs(5, seed))
    assert len(kept) == 4 * 5
    check_reports(pair, warm_up=5)


class StageBlock(TransformerBlock):  # type: ignore[misc]  # megatron-core has no types
    """Runs its layers itself."""

    def forward(self, hidden_states: Any, attention_mask: Any, *_args: Any, **given: Any) -> Any:
        hidden_states = hidden_states if self.pre_process else self.input_tensor
        given = {name: given[name] for name in ("rotary_pos_emb", "packed_seq_params")}
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states=hidden_states, attention_mask=attention_mask, **given)
        return hidden_states


@pytest.mark.parametrize("number", [0, 1])
def test_a_stage_whose_block_overrides_megatrons_forward_replays(stage: Make, number: int) -> None:
    """Bugs: the first one handed on a view, which Megatron refuses to free; the others warmed up for ever."""
    pair = stage(StageSchedule(stages=2, stage=number), deallocates=True)
    for model in (*pair.eager.models, *pair.graphed.models):
        model.decoder.__class__ = StageBlock
    for seed in range(4):
        pair.step(packs(5, seed))
    check_reports(pair, warm_up=2 * 5)


def test_leases_show_which_micro_batches_were_in_flight_of_models_that_are_gone_too(stage: Make) -> None:
    pair = stage(StageSchedule(stages=4, chunks=2))
    for seed in range(3):
        pair.step(packs(8, seed))
    plugin = rig.the_plugin()
    leases = plugin.leases()
    assert [name.partition(" (")[2] for name in leases] == ["stage 0, chunk 0) #2", "stage 0, chunk 1) #2"]
    for some, most in zip(leases.values(), pair.schedule.most_in_flight, strict=True):
        # The first step warms up; then a verification leases each slot.
        assert len(some) == most + 2 * 8 and all(grad for _slot, grad, *_ in some)
        assert {slot for slot, *_ in some} == {*range(most)} and all(end is not None for *_, end in some)
    del pair
    gc.collect()
    assert plugin.all_graphs() == [] and plugin.leases() == leases


def test_a_slot_that_somebody_holds_leaves_the_others_and_holds_captures_back(caplog: Any) -> None:
    pair = rig.Pair(plugin={"cuda_graph_slots": 2})
    pair.step(*packs(3, 0), times=2)
    trainer = pair.graphed
    trainer.zero_grad()
    held: list[Any] = []
    with trainer.chunk.decoder.register_forward_hook(lambda _block, _args, out: held.append(out)):
        rig.forward(trainer.model, packs(1, 1)[0], trainer.device)
    before = pair.report()["replays"]
    pair.step(*packs(3, 2))
    assert held and pair.report()["replays"] == before + 3 * rig.LAYERS
    graphs = []
    for is_held in (True, True, True, False):
        if not is_held:
            held.clear()
        pair.evaluate(*packs(3, 2))
        graphs.append(pair.report()["graphs"])
    assert graphs == [2 * 2 * rig.LAYERS] * 3 + [3 * 2 * rig.LAYERS]
    assert caplog.text.count("capture waits: ") == 1
