# SPDX-License-Identifier: Apache-2.0
"""What is measured of one stage of a pipeline that runs without the others: time by slots, memory, bits."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import graph_launches, host_seconds
from benchmarks.subjects.hosts import check_replays, install_for
from benchmarks.subjects.packs import a_pack
from benchmarks.subjects.stages import (
    DOCUMENTS,
    LAYERS,
    Batch,
    StageTrainer,
    be_deterministic,
    differing,
    drawn_packs,
)
from benchmarks.subjects.steps import batch_of, without_collection
from megagraph import megatron
from megagraph.decide.in_flight import Pass, StageSchedule
from megagraph.demo.trainer import ModelOptions
from megagraph.megatron.patch.installation import installed_plugin

WARM_UP, SAMPLES = 10, 150
MICRO_BATCHES = 8  # of a timed step: the launch queue has room for it
IN_THE_MIDDLE = StageSchedule(stages=18, stage=1)  # needs 17 slots, of which it gets as many as it is told
FEW, MANY = 12, 48  # micro-batches of a step


def measure_slots(model: ModelOptions, numbers: Sequence[int]) -> Answer:
    """One micro-batch after another, in slots that they take in turns; all numbers of slots in turns, too.

    The stage is one in the middle of a pipeline, which has nothing eager but what the driver itself does.

    Returns:
        By number of slots, `host` time of a micro-batch in us, and `launches` of graphs in it.
    """
    install_for(model.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1)
    steps = {slots: _step_in(slots, model) for slots in numbers}
    found: Answer = {
        str(slots): {"host": [], "launches": graph_launches(step)} for slots, step in steps.items()
    }
    with without_collection():
        for _ in range(WARM_UP + SAMPLES):
            for slots, step in steps.items():
                found[str(slots)]["host"].append(host_seconds(step) * 1e6 / MICRO_BATCHES)
    for slots, report in zip(numbers, megatron.reports(), strict=True):
        check_replays(report)
        if report["slots"] != slots or report["most_in_flight"] != 1:
            raise RuntimeError(f"expected one micro-batch at a time in {slots} slots, got {report}")
        of = found[str(slots)]
        of.update(host=of["host"][WARM_UP:], launches=of["launches"] / MICRO_BATCHES)
    return found


def _step_in(slots: int, model: ModelOptions) -> Callable[[], object]:
    """A step of a model that has so many slots, which has captured."""
    plugin = installed_plugin()
    assert plugin is not None
    config = dataclasses.replace(plugin.config, cuda_graph_slots=slots)
    trainer = StageTrainer(model, IN_THE_MIDDLE)
    batches = [batch_of(a_pack(model.max_tokens), trainer.device)] * MICRO_BATCHES
    passes = [Pass(is_forward, 0, index) for index in range(MICRO_BATCHES) for is_forward in (True, False)]
    step = partial(trainer.step, batches, passes=passes, keeps=False)
    with mock.patch.object(plugin, "config", config):  # which is asked when a model is first seen
        step()
        step()
    return step


def measure_memory(model: ModelOptions, schedule: StageSchedule, *, graphs: bool) -> Answer:
    """Memory of steps of `FEW` and of `MANY` full packs.

    Returns:
        `reserved`, the most that torch's allocator held; eager `kept`, what the forward of one micro-batch
        leaves for its backward; graphed `pools`, after few and after many, `slots` of all chunks, and
        `graphs`.
    """
    install_for(model.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1, mode="graph" if graphs else "eager")
    trainer = StageTrainer(model, schedule)
    batch = batch_of(a_pack(model.max_tokens), trainer.device)
    at_first: list[tuple[int, int]] = []

    def look(index: int, it: Pass) -> None:
        if index == 0 or (not it.is_forward and len(at_first) == 1):
            at_first.append((index, torch.cuda.memory_allocated()))

    pools = []
    for count in (FEW, MANY):
        for _ in range(3):
            at_first.clear()
            trainer.step([batch] * count, keeps=False, before=look)
        pools.append(sum(report["pool_bytes"] for report in megatron.reports()))
    torch.cuda.synchronize()
    reserved = torch.cuda.max_memory_reserved()
    if not graphs:
        (_, before), (forwards, after) = at_first
        return {"reserved": reserved, "kept": (after - before) / forwards}
    reports = megatron.reports()
    for report in reports:
        check_replays(report)
    slots, number = (sum(report[key] for report in reports) for key in ("slots", "graphs"))
    return {"reserved": reserved, "pools": pools, "slots": slots, "graphs": number}


def unfit(reports: Sequence[Mapping[str, Any]], schedule: StageSchedule) -> int:
    """How many chunks had other slots than the most that they may have in flight, or never had as many."""
    return sum(
        not report["slots"] == report["most_in_flight"] == need
        for report, need in zip(reports, schedule.most_in_flight, strict=True)
    )


def measure_order(model: ModelOptions, schedule: StageSchedule, layers: str, replays: int) -> Answer:
    """Trains a stage eager and graphed, on the same packs, in slots that are poisoned once they are free.

    Args:
        model: of the whole model.
        schedule: which stage it is, and in which order it runs.
        layers: of `LAYERS`.
        replays: of all chunks together, at least.

    Returns:
        How many values of outputs and gradients were `differing`, of how many `steps`; `replays`, and calls
        that were eager for other reasons than warming up as `eager`; as `unfit` how many chunks had other
        slots than their schedule needs, or never as many in flight.
    """
    be_deterministic()
    install_for(model.max_tokens, DOCUMENTS, poison=True, cuda_graph_warmup_steps=1)
    eager, graphed = (StageTrainer(model, schedule, spec=LAYERS[layers]) for _ in range(2))
    group = (schedule.group_size or schedule.stages) if schedule.chunks > 1 else 1
    most = 2 * group + schedule.stages  # have as many in flight as any number has
    counts = [count for count in range(1, most + 1) if schedule.is_legal(count)]
    found: Answer = {"differing": 0, "steps": 0, "replays": 0}
    while found["replays"] < replays:
        count = counts[-1 - found["steps"] % len(counts)]
        packs = drawn_packs(model.max_tokens, count, seed=found["steps"])
        batches: list[Batch] = [batch_of(pack, eager.device) for pack in packs]
        with megatron.disable_cuda_graphs_this_step():
            one = eager.step(batches)
        other = graphed.step(batches)
        found["differing"] += differing(one.tensors(), other.tensors())
        found["steps"] += 1
        reports = megatron.reports()[schedule.chunks :]
        found["replays"] = sum(report["replays"] for report in reports)
        if found["steps"] > 2 and not found["replays"]:
            raise RuntimeError(f"expected replays, got {reports}")
    found["eager"] = sum(
        count for report in reports for reason, count in report["eager"].items() if reason != "WARMING_UP"
    )
    found["unfit"] = unfit(reports, schedule)
    megatron.uninstall()
    return found
