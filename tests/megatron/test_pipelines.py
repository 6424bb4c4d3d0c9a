# SPDX-License-Identifier: Apache-2.0
"""Pipelines: the bits of eager in every stage and chunk, whatever number of micro-batches a step has."""

import dataclasses
from pathlib import Path
from typing import Any

import megatron_rig as rig
import moe_rig
import pipeline_jobs
import pytest
import torch
from mla_rig import mla_config
from torch import distributed
from worlds import World, on_ranks

import megagraph
from benchmarks.subjects.pipelines import Cut
from megagraph.report import read_report

pytestmark = pytest.mark.megatron

Reports = list[list[dict[str, Any]]]
CUTS = {
    "2 stages": Cut(),
    "2 stages of 2 chunks": Cut(chunks=2),
    "2 stages of 2 chunks, groups of 3": Cut(chunks=2, group_size=3),
}
DEALLOCATING = {"deallocate_pipeline_outputs": True}


def check(reports: Reports) -> None:
    """Of each rank and chunk: only the first step and evaluation ran eager, and slots are what is needed."""
    for of_rank in reports:
        for report in of_rank:
            assert report["eager"] == {"WARMING_UP": report["first"] * report["layers"]}
            assert report["failures"] == []
            assert report["most_in_flight"] == report["slots"] == report["schedule"]
            assert report["verification"]["verified"] > 0


@pytest.mark.both
@pytest.mark.parametrize("cut", CUTS)
def test_bits(world2: World, cut: str) -> None:
    """With packs that fill their capacity, whose output the schedule keeps over the next forward."""
    check(world2.run(pipeline_jobs.train_pair, cut=CUTS[cut]))


@pytest.mark.parametrize("cut", list(CUTS)[:2])
@on_ranks(2)
def test_eager_is_what_megatron_does_without_the_plugin(cut: str) -> None:
    """Beside it, in mode `eager`, on full packs."""
    model = CUTS[cut]
    model.start()
    options = dataclasses.replace(rig.OPTIONS, layers=model.stages * model.chunks, heads=4)
    first = range(20, 26)
    micros = [rig.Micro(lengths=(n, rig.CAPACITY.tokens - n), seed=n) for n in first]
    plain = pipeline_jobs.Trainer(model, options, ddp={}).train(micros, eager=False)
    megagraph.install(rig.graph_config(mode="eager"))
    ours = pipeline_jobs.Trainer(model, options, ddp={}).train(micros, eager=False)
    torch.testing.assert_close([plain.losses, plain.grads], [ours.losses, ours.grads])
    distributed.barrier()  # a stage that is done must not close what another still sends over


@pytest.mark.both
@pytest.mark.parametrize("cut", CUTS)
def test_outputs_that_the_schedule_empties_once_they_are_sent(world2: World, cut: str) -> None:
    if CUTS[cut].chunks > 1 and not frees_after_sending():
        pytest.skip("this release frees what it still sends: eager differs from run to run")
    check(world2.run(pipeline_jobs.train_pair, cut=CUTS[cut], transformer=DEALLOCATING))


def frees_after_sending() -> bool:
    from megatron.core import __version__

    return tuple(map(int, __version__.split(".")[:2])) >= (0, 19)


def test_packs_that_fit_no_capacity_run_eager_and_the_others_replay(world2: World) -> None:
    for of_rank in world2.run(pipeline_jobs.train_pair, cut=Cut(chunks=2), misfits=True):
        for report in of_rank:
            assert set(report["eager"]) == {"WARMING_UP", "TOO_MANY_SEQUENCES"}
            assert report["eager"]["TOO_MANY_SEQUENCES"] == 2


@pytest.mark.parametrize("slots", [1, 2, 9])
def test_a_number_of_slots_is_the_most_that_a_chunk_gets(world2: World, slots: int) -> None:
    reports = world2.run(pipeline_jobs.train_pair, cut=Cut(chunks=2), plugin={"cuda_graph_slots": slots})
    for of_rank in reports:
        for report in of_rank:
            assert report["slots"] == report["most_in_flight"] == min(slots, report["schedule"])
            assert ("NO_FREE_SLOT" in report["eager"]) == (slots < report["schedule"])
            assert set(report["eager"]) <= {"WARMING_UP", "NO_FREE_SLOT"}


OPTIONS: dict[str, dict[str, Any]] = {
    "several layers": {"layers": 3},
    "gradients reduced in the backward": {"ddp": {"overlap_grad_reduce": True, "bucket_size": 2000}},
    "packs of as many rows": {"transformer": {"variable_seq_lengths": False}},
    "gradients whose reduction the schedule begins": {
        "ddp": {"overlap_grad_reduce": True, "bucket_size": 2000},
        "aligned": True,
    },
    "embeddings of both ends shared": {"shared_embeddings": True},
    "experts": {"transformer": moe_rig.BASE, "plugin": {"cuda_graph_modules": ("attn", "moe_router")}},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_with(world2: World, option: str) -> None:
    check(world2.run(pipeline_jobs.train_pair, cut=Cut(chunks=2), **OPTIONS[option]))


def test_experts_that_ranks_of_a_stage_share(world4: World) -> None:
    """Attention and router are graphed; the exchange of rows between experts' ranks is not."""
    cut, experts = Cut(chunks=2, expert_parallel=2), OPTIONS["experts"]
    check(world4.run(pipeline_jobs.train_pair, cut=cut, **experts))


def test_mla(world2: World) -> None:
    check(world2.run(pipeline_jobs.train_pair, cut=Cut(), transformer=mla_config("low rank, RoPE")))


def test_four_stages(world4: World) -> None:
    check(world4.run(pipeline_jobs.train_pair, cut=Cut(stages=4)))


@pytest.mark.parametrize(("chunks", "aligned"), [(1, False), (2, True)])
def test_stages_of_two_data_parallel_ranks(world4: World, chunks: int, aligned: bool) -> None:
    """Parameters are sharded over the ranks of a stage, and gathered while chunks run."""
    ddp = {"overlap_grad_reduce": True, "bucket_size": 2000}
    ddp |= {"use_distributed_optimizer": True, "overlap_param_gather": True}
    check(world4.run(pipeline_jobs.train_pair, cut=Cut(chunks=chunks), ddp=ddp, aligned=aligned))


def test_packs_that_ranks_of_a_stage_share(world4: World) -> None:
    check(world4.run(pipeline_jobs.train_pair, cut=Cut(context_parallel=2)))


def test_packs_of_several_sizes_in_flight(world4: World) -> None:
    """Some micro-batches are shared by both ranks of a stage, and others by none."""
    check(world4.run(pipeline_jobs.train_pair, cut=Cut(chunks=2), cp_sizes=(1, 2)))


def test_stages_of_one_layer_and_of_three(world2: World) -> None:
    uneven = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}
    reports = world2.run(pipeline_jobs.train_pair, cut=Cut(), layers=2, transformer=uneven)
    check(reports)
    assert [report["layers"] for (report,) in reports] == [1, 3]


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


def test_two_stages_of_two_tensor_parallel_ranks(world4: World) -> None:
    check(world4.run(pipeline_jobs.train_pair, cut=Cut(tensor_parallel=2)))


def test_every_stage_and_chunk_is_in_the_report_and_one_rank_of_each_stage_in_the_log(
    world4: World, tmp_path: Path
) -> None:
    """Two data-parallel ranks a stage; rank 0 alone did speak."""
    report = tmp_path / "run.json"
    said = world4.run(pipeline_jobs.speak, cut=Cut(chunks=2), report=str(report))
    names = [f"GPTModel (stage {stage}, chunk {chunk})" for stage in range(2) for chunk in range(2)]
    # Each is there twice: eager, and graphed.
    assert [model["model"] for model in read_report(report)] == [
        *(
            f"{name}{number}"
            for stage in (0, 2)
            for number in ("", " #2")
            for name in names[stage : stage + 2]
        )
    ]
    assert len(list(tmp_path.iterdir())) == 2
    speaking = [[name for name in names if any(name in line for line in lines)] for lines in said]
    assert sorted(speaking) == [[], [], names[:2], names[2:]]
