# SPDX-License-Identifier: Apache-2.0
"""Any stage of a pipeline in one process: its order of forwards and backwards, with the bits of eager."""

import dataclasses
import gc
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from megatron_rig import OPTIONS, Install, Micro, the_plugin
from same_bits import assert_same_bits

import megagraph
from benchmarks.subjects.pipelines import Batch, Pass, StageStep, StageTrainer
from megagraph.decide.dispatch import StageSchedule

FULL = OPTIONS.max_tokens
SHAPES = [(9, 20), (FULL,), (3, 30, 8), (24, FULL - 24), (12,)]


def schedules(stages: int, chunks: int, *of: int) -> list[StageSchedule]:
    return [StageSchedule(stages=stages, stage=stage, chunks=chunks) for stage in of or range(stages)]


SCHEDULES = [*schedules(4, 1, 0, 1, 3), *schedules(4, 2, 0, 2), *schedules(8, 4, 3)]
OTHERS = [*schedules(4, 1, 2), *schedules(4, 2, 1, 3), *schedules(8, 4, 0, 1, 2, 4, 5, 6, 7)]


def batches(count: int, seed: int, device: torch.device) -> list[Batch]:
    """So many packs, each another one."""

    def batch(place: int) -> Batch:
        micro = Micro(lengths=SHAPES[(place + seed) % len(SHAPES)], seed=100 * seed + place)
        tokens, labels, _mask, positions = (rows[None].to(device) for rows in micro.row_lists())
        offsets = torch.tensor([0, *accumulate(micro.lengths)], dtype=torch.int32, device=device)
        rows = {"tokens": tokens, "labels": labels, "positions": positions}
        return {**rows, "offsets": offsets, "longest": micro.longest}

    return [batch(place) for place in range(count)]


def _without_ids(_chunk: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """As a host may call a chunk that begins with the hidden states of another stage."""
    return args, {**given, "input_ids": None, "position_ids": None}


class StagePair:
    """The same stage twice: one runs eager, the other with graphs."""

    def __init__(self, schedule: StageSchedule, *, deallocates: bool = False) -> None:
        options = dataclasses.replace(OPTIONS, layers=schedule.stages * schedule.chunks)
        self.eager, self.graphed = pair = [
            StageTrainer(options, schedule, deallocates=deallocates) for _ in range(2)
        ]
        self.schedule = schedule
        for trainer in pair if deallocates else ():
            for model, chunk in zip(trainer.models, trainer.chunks, strict=True):
                if not model.pre_process:
                    chunk.register_forward_pre_hook(_without_ids, with_kwargs=True)

    def step(self, count: int, seed: int, *, forward_only: bool = False) -> StageStep:
        """A step of both, which must leave the same bits."""
        some = batches(count, seed, self.eager.device)
        with megagraph.disable_cuda_graphs_this_step():
            expected = self.eager.step(some, forward_only=forward_only)
        found = self.graphed.step(some, forward_only=forward_only)
        assert_same_bits(expected, found, f"step {seed}")
        return found

    def check_reports(self, warm_up: int) -> None:
        """All but some micro-batches replayed, in as many slots as there must be, of which none is held."""
        plugin = the_plugin()
        for model, most in zip(self.graphed.models, self.schedule.most_in_flight, strict=True):
            graphs = plugin.graphs_of_model(model)
            report = graphs.report()
            assert report["eager"] == {"WARMING_UP": warm_up * report["layers"]} and report["failures"] == []
            assert report["most_in_flight"] == report["slots"] == most
            assert graphs.captures.bank.holders() == ""


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
def test_bits(install: Install, schedule: StageSchedule, deallocates: bool) -> None:
    install()
    pair = StagePair(schedule, deallocates=deallocates)
    for seed, count in enumerate(counts(schedule)):
        pair.step(count, seed)
        pair.step(counts(schedule)[0], seed, forward_only=True)
    pair.check_reports(warm_up=2 * counts(schedule)[0])


def test_a_step_that_raises_anywhere_leaves_no_slot_held(install: Install) -> None:
    """In the warm-up, in the steady state, in the cool-down; before a forward, and before a backward."""
    install()
    schedule = StageSchedule(stages=4, stage=1, chunks=2)
    pair = StagePair(schedule)
    pair.step(8, 0)
    are_forward = [is_forward for is_forward, _chunk, _micro_batch in schedule.passes(8)]
    first_backward = are_forward.index(False)
    last_forward = max(place for place, is_forward in enumerate(are_forward) if is_forward)
    for seed, stop in enumerate((1, first_backward - 1, first_backward, last_forward, last_forward + 2), 2):

        def raise_there(index: int, _it: Pass, stop: int = stop) -> None:
            if index == stop:
                raise OSError("lost")

        with pytest.raises(OSError, match="lost"):
            pair.graphed.step(batches(8, seed, pair.graphed.device), before=raise_there)
        pair.step(8, seed)
    pair.check_reports(warm_up=8)


def test_an_output_that_somebody_keeps_holds_no_slot(install: Install) -> None:
    """What a stage hands on is a copy, also where the pack fills its capacity."""
    install()
    pair = StagePair(StageSchedule(stages=2))
    kept = []
    hook = pair.graphed.models[0].register_forward_hook(lambda _model, _args, out: kept.append(out))
    for seed in range(4):
        pair.step(5, seed)
    hook.remove()
    assert len(kept) == 4 * 5
    pair.check_reports(warm_up=5)


def test_leases_show_which_micro_batches_were_in_flight_of_models_that_are_gone_too(install: Install) -> None:
    install()
    pair = StagePair(StageSchedule(stages=4, chunks=2))
    for seed in range(3):
        pair.step(8, seed)
    plugin = the_plugin()
    leases = plugin.leases()
    assert [name.partition(" (")[2] for name in leases] == ["stage 0, chunk 0) #2", "stage 0, chunk 1) #2"]
    for some, most in zip(leases.values(), pair.schedule.most_in_flight, strict=True):
        # The first step warms up; then a verification leases each slot.
        assert len(some) == most + 2 * 8 and all(it.grad for it in some)
        # Sorted by time; what ends just when another one begins ends first.
        ends = [(it.end, -1, it.slot) for it in some if it.end is not None]
        events = sorted([*((it.begin, 1, it.slot) for it in some), *ends])
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
