# SPDX-License-Identifier: Apache-2.0
"""Any stage of a pipeline in one process: its order of forwards and backwards, with the bits of eager."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pipeline_jobs
import pytest
from megatron_rig import LAYERS, OPTIONS, Install, Micro, Pair, forward, hands, ran, the_plugin
from pipeline_jobs import SHAPES

from benchmarks.subjects.pipelines import Cut, alone
from megagraph._C import StageSchedule


def schedules(stages: int, chunks: int, *of: int) -> list[StageSchedule]:
    return [StageSchedule(stages=stages, stage=stage, chunks=chunks) for stage in of or range(stages)]


SCHEDULES = [*schedules(4, 1, 0, 1, 3), *schedules(4, 2, 0, 2), *schedules(8, 4, 3)]
OTHERS = [*schedules(4, 1, 2), *schedules(4, 2, 1, 3), *schedules(8, 4, 0, 1, 2, 4, 5, 6, 7)]


def packs(count: int, seed: int) -> list[Micro]:
    lengths = (SHAPES[(place + seed) % len(SHAPES)] for place in range(count))
    return [Micro(lengths=each, seed=100 * seed + place) for place, each in enumerate(lengths)]


Make = Callable[..., pipeline_jobs.Pair]


@pytest.fixture
def stage(install: Install) -> Iterator[Make]:
    """Makes a pair of a stage without the others, with the plugin installed."""
    install()
    with contextlib.ExitStack() as stack:

        def make(schedule: StageSchedule, *, deallocates: bool = False) -> pipeline_jobs.Pair:
            cut = Cut(stages=schedule.stages, chunks=schedule.chunks)
            options = dataclasses.replace(OPTIONS, layers=schedule.stages * schedule.chunks)
            how: dict[str, Any] = {"transformer": {"deallocate_pipeline_outputs": deallocates}, "ddp": {}}
            others = stack.enter_context(alone(cut, schedule.stage))
            pair = pipeline_jobs.Pair(cut, options, others=others, **how)
            for trainer in pair.both:  # or weights would soon be infinite: what others send is random
                trainer.update = lambda: None
            # As a host may call a chunk that begins with the hidden states of another stage.
            for trainer in pair.both if deallocates else ():
                for model, chunk in zip(trainer.models, trainer.chunks, strict=True):
                    if not model.pre_process:
                        hands(chunk, lambda given: {**given, "input_ids": None, "position_ids": None})
            return pair

        yield make


def check_reports(pair: pipeline_jobs.Pair, warm_up: int) -> None:
    """All but some micro-batches replayed, in as many slots as there must be."""
    for report in pair.reports():
        ran(report, WARMING_UP=warm_up * report["layers"])
        assert report["most_in_flight"] == report["slots"] == report["schedule"]


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
def test_bits(stage: Make, schedule: StageSchedule, deallocates: bool) -> None:
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


def test_leases_show_which_micro_batches_were_in_flight_of_models_that_are_gone_too(stage: Make) -> None:
    pair = stage(StageSchedule(stages=4, chunks=2))
    for seed in range(3):
        pair.step(packs(8, seed))
    plugin = the_plugin()
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
    pair = Pair(plugin={"cuda_graph_slots": 2})
    pair.step(*packs(3, 0), times=2)
    trainer = pair.graphed
    trainer.zero_grad()
    held: list[Any] = []
    with trainer.chunk.decoder.register_forward_hook(lambda _block, _args, out: held.append(out)):
        forward(trainer.model, packs(1, 1)[0], trainer.device)
    before = pair.report()["replays"]
    pair.step(*packs(3, 2))
    assert held and pair.report()["replays"] == before + 3 * LAYERS
    graphs = []
    for is_held in (True, True, True, False):
        if not is_held:
            held.clear()
        pair.evaluate(*packs(3, 2))
        graphs.append(pair.report()["graphs"])
    assert graphs == [2 * 2 * LAYERS] * 3 + [3 * 2 * LAYERS]
    assert caplog.text.count("capture waits: ") == 1
