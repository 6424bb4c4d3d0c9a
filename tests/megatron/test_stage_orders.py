# SPDX-License-Identifier: Apache-2.0
"""Any stage of a pipeline in one process: its order of forwards and backwards, with the bits of eager."""

import dataclasses
import gc
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import megatron_rig
import pytest
import torch
from megatron_rig import LAYERS, OPTIONS, Install, Micro, Step, step, the_plugin
from same_bits import assert_same_bits
from torch import Tensor

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


class StagePair:
    """The same stage twice: one runs eager, the other with graphs."""

    def __init__(self, schedule: StageSchedule, *, deallocates: bool = False) -> None:
        options = dataclasses.replace(OPTIONS, layers=schedule.stages * schedule.chunks)
        self.eager, self.graphed = (
            StageTrainer(options, schedule, deallocates=deallocates) for _ in range(2)
        )
        self.schedule = schedule

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


# -- a chunk that begins with hidden states of another stage ---------------------------------------


PACKS = [(9, 20), (3, 30, 8), (64,), (12,), (5, 5, 5)]
MISFIT = (4,) * 9


class LaterTrainer(megatron_rig.ModelTrainer):
    """Trains a chunk that embeds nothing."""

    def __init__(self, *, is_last: bool, has_ids: bool) -> None:
        self.is_last, self.has_ids = is_last, has_ids
        self.inputs: list[Tensor] = []
        given = {"pre_process": False, "post_process": is_last}
        super().__init__(arguments=lambda _: {**given, "share_embeddings_and_output_weights": False})

    def forward(self, micro: Micro) -> tuple[Tensor, Any]:
        """A micro-batch of hidden states that another stage would send."""
        tokens, labels, mask, positions = (rows.to(self.device) for rows in micro.row_lists())
        generator = torch.Generator().manual_seed(micro.seed)
        hidden = torch.randn(tokens.numel(), 1, OPTIONS.hidden, generator=generator).to(self.device)
        dtype = torch.bfloat16 if OPTIONS.bf16 else torch.float32
        self.inputs.append(hidden.to(dtype).requires_grad_(torch.is_grad_enabled()))
        self.chunk.set_input_tensor(self.inputs[-1])
        out = self.model(
            input_ids=tokens[None] if self.has_ids else None,
            position_ids=positions[None] if self.has_ids else None,
            attention_mask=None,
            labels=labels[None] if self.is_last else None,
            packed_seq_params=micro.params(self.device),
        )
        assert out.shape == ((1, tokens.numel()) if self.is_last else (tokens.numel(), 1, OPTIONS.hidden))
        of_rows = out if self.is_last else out.float().square().mean(-1).view(1, -1)
        return of_rows, lambda losses: megatron_rig._loss(losses, mask)


def _step(trainer: LaterTrainer, lengths: list[tuple[int, ...]], *, eager: bool = False) -> Step:
    """A step, with the gradients of what was handed over."""
    trainer.inputs.clear()
    micros = [Micro(lengths=each, seed=sum(each)) for each in lengths]
    left = step(trainer, micros, eager=eager)
    for index, given in enumerate(trainer.inputs):
        assert given.grad is not None
        left.grads[f"input {index}"] = given.grad.clone()
    return left


@pytest.mark.parametrize(("is_last", "has_ids"), [(True, False), (True, True), (False, False)])
def test_a_chunk_replays_with_the_bits_of_eager(
    install: Install, is_last: bool, has_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    eager, graphed = (LaterTrainer(is_last=is_last, has_ids=has_ids) for _ in range(2))
    by_model = {id(trainer.model): trainer for trainer in (eager, graphed)}
    monkeypatch.setattr(
        megatron_rig, "forward", lambda model, micro, device: by_model[id(model)].forward(micro)
    )
    for index in range(4):
        lengths = [PACKS[(index + place) % len(PACKS)] for place in range(3)]
        assert_same_bits(_step(eager, lengths, eager=True), _step(graphed, lengths), f"step {index}")
    lengths = [PACKS[0], MISFIT]
    assert_same_bits(_step(eager, lengths, eager=True), _step(graphed, lengths), "a pack that does not fit")
    _of_eager, report = megagraph.reports()
    assert report["eager"] == {"WARMING_UP": 3 * LAYERS, "TOO_MANY_SEQUENCES": LAYERS}
    assert report["replays"] == (3 * 3 + 1) * LAYERS and report["failures"] == []
    assert report["verification"]["verified"] == 1
    assert graphed.chunk.decoder.input_tensor is graphed.inputs[-1]
