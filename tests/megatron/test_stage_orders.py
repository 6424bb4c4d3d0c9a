# SPDX-License-Identifier: Apache-2.0
"""Any stage of a pipeline in one process: its order of forwards and backwards, with the bits of eager."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import pipeline_jobs
import pytest
import torch
from megatron_rig import (
    LAYERS,
    ON_GPU,
    OPTIONS,
    Install,
    Micro,
    Pair,
    Step,
    forward,
    grads,
    hands,
    the_plugin,
)
from same_bits import assert_same_bits

import megagraph
from benchmarks.subjects.pipelines import Cut, Others, alone
from megagraph._C import StageSchedule
from megagraph.demo.trainer import Trainer

FULL = OPTIONS.max_tokens
SHAPES = [(9, 20), (FULL,), (3, 30, 8), (24, FULL - 24), (12,)]


def schedules(stages: int, chunks: int, *of: int) -> list[StageSchedule]:
    return [StageSchedule(stages=stages, stage=stage, chunks=chunks) for stage in of or range(stages)]


SCHEDULES = [*schedules(4, 1, 0, 1, 3), *schedules(4, 2, 0, 2), *schedules(8, 4, 3)]
OTHERS = [*schedules(4, 1, 2), *schedules(4, 2, 1, 3), *schedules(8, 4, 0, 1, 2, 4, 5, 6, 7)]


def packs(count: int, seed: int) -> list[Micro]:
    lengths = (SHAPES[(place + seed) % len(SHAPES)] for place in range(count))
    return [Micro(lengths=each, seed=100 * seed + place) for place, each in enumerate(lengths)]


class StagePair:
    """The same stage twice, without the others: one runs eager, the other with graphs."""

    def __init__(self, schedule: StageSchedule, others: Others, *, deallocates: bool = False) -> None:
        cut = Cut(stages=schedule.stages, chunks=schedule.chunks)
        options = dataclasses.replace(OPTIONS, layers=schedule.stages * schedule.chunks)
        how: dict[str, Any] = {"transformer": {"deallocate_pipeline_outputs": deallocates}, "ddp": {}}
        self.both = self.eager, self.graphed = [
            pipeline_jobs.Trainer(cut, options, others=others, **how) for _ in range(2)
        ]
        self.schedule, self.others = schedule, others
        for trainer in self.both:  # or weights would soon be infinite: what others send is random
            trainer.update = lambda: None
        # As a host may call a chunk that begins with the hidden states of another stage.
        for trainer in self.both if deallocates else ():
            for model, chunk in zip(trainer.models, trainer.chunks, strict=True):
                if not model.pre_process:
                    hands(chunk, lambda given: {**given, "input_ids": None, "position_ids": None})

    def step(self, count: int, seed: int, *, forward_only: bool = False) -> None:
        """A step of both, which must leave the same bits, also in what other stages are sent."""
        how = {"micros": packs(count, seed), "forward_only": forward_only}
        one, other = (it.train(eager=it is self.eager, **how) for it in self.both)
        assert_same_bits(one, other, f"step {seed}")

    def check_reports(self, warm_up: int) -> None:
        """All but some micro-batches replayed, in as many slots as there must be, of which none is held."""
        plugin = the_plugin()
        for model, most in zip(self.graphed.models, self.schedule.most_in_flight, strict=True):
            graphs = plugin.graphs_of_model(model)
            report = graphs.report()
            assert report["eager"] == {"WARMING_UP": warm_up * report["layers"]} and report["failures"] == []
            assert report["most_in_flight"] == report["slots"] == most
            assert graphs.captures.bank.holders() == ""


@pytest.fixture
def stage(install: Install) -> Iterator[Callable[..., StagePair]]:
    """Makes a pair of a stage, with the plugin installed."""
    install()
    with contextlib.ExitStack() as stack:

        def make(schedule: StageSchedule, **how: bool) -> StagePair:
            cut = Cut(stages=schedule.stages, chunks=schedule.chunks)
            return StagePair(schedule, stack.enter_context(alone(cut, schedule.stage)), **how)

        yield make


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
def test_bits(stage: Callable[..., StagePair], schedule: StageSchedule, deallocates: bool) -> None:
    pair = stage(schedule, deallocates=deallocates)
    for seed, count in enumerate(counts(schedule)):
        pair.step(count, seed)
        pair.step(counts(schedule)[0], seed, forward_only=True)
    pair.check_reports(warm_up=2 * counts(schedule)[0])


def test_a_step_that_raises_anywhere_leaves_no_slot_held(stage: Callable[..., StagePair]) -> None:
    """In the warm-up, in the steady state, in the cool-down; before a forward, and before a backward."""
    schedule = StageSchedule(stages=4, stage=1, chunks=2)
    pair = stage(schedule)
    pair.step(8, 0)
    are_forward = [is_forward for is_forward, _chunk, _micro_batch in schedule.passes(8)]
    first_backward = are_forward.index(False)
    last_forward = max(place for place, is_forward in enumerate(are_forward) if is_forward)
    for seed, stop in enumerate((1, first_backward - 1, first_backward, last_forward, last_forward + 2), 2):

        def raise_there(number: int, stop: int = stop) -> None:
            if number == stop:
                raise OSError("lost")

        pair.others.at_message = raise_there
        with pytest.raises(OSError, match="lost"):
            pair.graphed.train(packs(8, seed), eager=False)
        pair.others.at_message = lambda number: None
        pair.step(8, seed)
    pair.check_reports(warm_up=8)


def test_an_output_that_somebody_keeps_holds_no_slot(stage: Callable[..., StagePair]) -> None:
    """What a stage hands on is a copy, also where the pack fills its capacity."""
    pair = stage(StageSchedule(stages=2))
    kept = []
    hook = pair.graphed.models[0].register_forward_hook(lambda _model, _args, out: kept.append(out))
    for seed in range(4):
        pair.step(5, seed)
    hook.remove()
    assert len(kept) == 4 * 5
    pair.check_reports(warm_up=5)


def test_leases_show_which_micro_batches_were_in_flight_of_models_that_are_gone_too(
    stage: Callable[..., StagePair],
) -> None:
    pair = stage(StageSchedule(stages=4, chunks=2))
    for seed in range(3):
        pair.step(8, seed)
    plugin = the_plugin()
    leases = plugin.leases()
    assert [name.partition(" (")[2] for name in leases] == ["stage 0, chunk 0) #2", "stage 0, chunk 1) #2"]
    for some, most in zip(leases.values(), pair.schedule.most_in_flight, strict=True):
        # The first step warms up; then a verification leases each slot.
        assert len(some) == most + 2 * 8 and all(grad for _slot, grad, *_ in some)
        # Sorted by time; what ends just when another one begins ends first.
        ends = [(end, -1, slot) for slot, *_, end in some if end is not None]
        events = sorted([*((begin, 1, slot) for slot, _grad, begin, _end in some), *ends])
        assert len(ends) == len(some)
        held: set[int] = set()
        in_flight = []
        for _moment, change, slot in events:
            assert (slot in held) is (change < 0), "a slot is leased once at a time"
            held ^= {slot}
            in_flight.append(len(held))
        assert max(in_flight) == most
    del pair
    gc.collect()
    assert plugin.all_graphs() == [] and plugin.leases() == leases


# -- several micro-batches of a model in flight ------------------------------------------------------

STEPS = 8 if ON_GPU else 2
# Forwards and backwards of micro-batches by their number, in the order of a host.
ORDERS = {
    "1F1B": "F0 F1 B0 F2 B1 B2",
    "last first": "F0 F1 B1 B0 F2 B2",
    "all forwards first": "F0 F1 F2 B0 B1 B2",
}


def _micros(seed: int) -> list[Micro]:
    return [Micro(lengths=(3 + seed % 5 + i, 20 - i, 4 + seed % 7), seed=3 * seed + i) for i in range(3)]


def _run(trainer: Trainer, order: str, micros: Sequence[Micro]) -> Step:
    """A step outside of any schedule."""
    trainer.zero_grad()
    losses: dict[int, Any] = {}
    kept = []
    for what, number in order.split():
        index = int(number)
        if what == "F":
            out, reduce = forward(trainer.model, micros[index], trainer.device)
            losses[index], left = reduce(out)
            kept.append(left["losses"])
            del out
        else:
            losses.pop(index).backward()
    return Step(losses=kept, grads=grads(trainer.chunk))


@pytest.mark.parametrize(
    ("order", "slots"), [*((it, 2) for it in ORDERS), ("1F1B", 1), ("all forwards first", 3)]
)
def test_as_many_micro_batches_replay_as_there_are_slots(order: str, slots: int) -> None:
    pair = Pair(plugin={"cuda_graph_slots": slots})
    pair.step(*_micros(0), times=2)
    before = pair.report()
    assert before["graphs"] == 2 * LAYERS * slots and before["verification"]["verified"] == 1
    for seed in range(1, STEPS + 1):
        assert_same_bits(
            *pair.each(partial(_run, order=ORDERS[order], micros=_micros(seed))), f"step {seed}:"
        )
        for trainer in pair.both:
            trainer.update()
    in_flight = accumulate(1 if task.startswith("F") else -1 for task in ORDERS[order].split())
    report = pair.report()
    eager_calls = report["eager"].get("NO_FREE_SLOT", 0)
    assert report["replays"] - before["replays"] + eager_calls == STEPS * 3 * LAYERS
    assert (eager_calls == 0) is (max(in_flight) <= slots)
    assert set(report["eager"]) <= {"WARMING_UP", "NO_FREE_SLOT"}
    if slots == 1 and order == "1F1B":
        assert eager_calls == STEPS * LAYERS


def test_a_slot_that_somebody_holds_leaves_the_others_and_holds_captures_back(caplog: Any) -> None:
    pair = Pair(plugin={"cuda_graph_slots": 2})
    pair.step(*_micros(0), times=2)
    trainer = pair.graphed
    trainer.zero_grad()
    held: list[Any] = []
    handle = trainer.chunk.decoder.register_forward_hook(lambda _block, _args, out: held.append(out))
    forward(trainer.model, _micros(1)[0], trainer.device)
    handle.remove()
    before = pair.report()["replays"]
    pair.step(*_micros(2))
    assert held and pair.report()["replays"] == before + 3 * LAYERS
    graphs = []
    for is_held in (True, True, True, False):
        if not is_held:
            held.clear()
        pair.evaluate(*_micros(2))
        graphs.append(pair.report()["graphs"])
    assert graphs == [2 * 2 * LAYERS] * 3 + [3 * 2 * LAYERS]
    assert caplog.text.count("capture waits: ") == 1


@pytest.mark.gpu
def test_each_slot_has_memory_of_its_own() -> None:
    """Of what is kept for a backward; what is temporary all of them share."""
    sizes = []
    for slots in (2, 3, 4):
        pair = Pair(plugin={"cuda_graph_slots": slots})
        pair.step(*_micros(0), times=2)
        sizes.append(pair.report()["pool_bytes"])
        megagraph.uninstall()
        del pair
        gc.collect()
        torch.cuda.empty_cache()
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0
