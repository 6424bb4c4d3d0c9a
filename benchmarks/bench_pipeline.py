# SPDX-License-Identifier: Apache-2.0
"""Pipelines: what slots cost, memory of a stage, and trainings of two ranks.

What a stage does depends on its order of forwards and backwards alone. So time by slots and memory are of one
stage in one process, with recorded activations in place of what stages send ("one stage alone"). The
trainings are of real ranks; where there is one GPU they share it, and what they send goes over sockets: such
times tell nothing of ranks on GPUs of their own. They run with deterministic algorithms, eager and graphed
alike; the last one leaves its report. Each part runs in a process of its own.
"""

from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.clocks import MIB
from benchmarks.measuring.figures import Measurement, plain, timed, timed_ratio
from benchmarks.measuring.results import Figure
from benchmarks.subjects import pipelines, stages
from benchmarks.subjects.hosts import DETERMINISTIC, Parts, answering, of_slowest, on_ranks
from benchmarks.subjects.packs import model_options
from benchmarks.subjects.pipelines import Cut
from megagraph.decide.dispatch import StageSchedule

SLOTS = (1, 4, 16)
SLOTS_MODEL = model_options(512, layers=4 * stages.IN_THE_MIDDLE.stages, tokens=512)
# Stage 0, which has the most in flight.
MEMORY = {
    "stage 0 of PP=4, 12 layers": StageSchedule(stages=4),
    "stage 0 of PP=4, 2 chunks of 6 layers": StageSchedule(stages=4, chunks=2),
}
MEMORY_MODEL = model_options(1024, layers=48, tokens=4096)
MODEL = model_options(1024, layers=8, tokens=2048)
HOW = ("eager", "graphed")
PEAK = 1.10
TRAININGS = {
    f"{cut.name}, {layers} layers": (cut, layers)
    for cut in (Cut(), Cut(chunks=2))
    for layers in stages.LAYERS
}
RANKS = 2


def _train(cut: Cut, layers: str) -> Answer:
    ranks = on_ranks(RANKS, pipelines.train, MODEL, cut, layers)
    waits = {name: ranks[-1][name] for name in (f"{how} waits" for how in HOW)}
    return {**of_slowest(ranks, *HOW), **waits, "differing": sum(rank["differing"] for rank in ranks)}


PARTS: Parts = {
    "slots": partial(stages.measure_slots, SLOTS_MODEL, SLOTS),
    **{
        f"{name}: {how}": partial(stages.measure_memory, MEMORY_MODEL, schedule, graphs=how == "graphed")
        for name, schedule in MEMORY.items()
        for how in HOW
    },
    **{name: partial(_train, *training) for name, training in TRAININGS.items()},
}
answer = answering(PARTS)


def _slot_figures() -> list[Figure]:
    found = measure_part(__name__, "slots")
    one, *others = (found[str(slots)] for slots in SLOTS)
    name = "one stage alone, hidden 512, 4 layers"
    figures = [timed(f"{name}, one slot: host time of a micro-batch", one, "us")]
    beside = {"rival": "one slot", "rival_value": median(one)}
    for slots, of in zip(SLOTS[1:], others, strict=True):
        title = f"{name}, {slots} slots that micro-batches take in turns"
        figures += [
            timed(f"{title}: host time of a micro-batch", of, "us", **beside),
            timed_ratio(f"{title}: its host time over that of one", of, one, "x", bar=1.03),
        ]
    return figures


def _memory_figures(name: str) -> list[Figure]:
    eager, graphed = (measure_part(__name__, f"{name}: {how}") for how in HOW)
    title, peak = f"one stage alone, {name}, hidden 1024, full packs of 4096", eager["reserved"] / MIB
    rival = {"rival": "eager, the same order", "rival_value": peak, "bar": PEAK * peak}
    return [
        Figure(name=f"{title}: peak memory reserved", value=graphed["reserved"] / MIB, unit="MiB", **rival),
        *plain(title, {"slots of all chunks": (graphed["slots"], "slots")}),
    ]


def _training_figures(name: str, report: Path) -> list[Figure]:
    found = measure_part(__name__, name, environment={**DETERMINISTIC, "MEGAGRAPH_REPORT": str(report)})
    whose = "on GPUs of their own" if torch.cuda.device_count() >= RANKS else "that share a GPU"
    title = f"{RANKS} ranks {whose}, {name}, hidden 1024, 8 layers, packs of up to 2048"
    differ = f"{title}, {pipelines.STEPS} steps: values that differ from eager"
    return [
        *(timed(f"{title}, {how}: a step, median", found[how], "ms") for how in HOW),
        *(
            timed(f"{title}, {how}: host time for shapes in a step, median", found[f"{how} waits"], "ms")
            for how in HOW
        ),
        Figure(name=differ, value=found["differing"], unit="values", bar=0),
    ]


def measure(measurement: Measurement) -> None:
    """Measures slots, memory and trainings."""
    measurement.take("slots", _slot_figures)
    for name in MEMORY:
        measurement.take(name, partial(_memory_figures, name))
    report = measurement.path.with_name(f"{measurement.path.stem}_report.json")
    for name in TRAININGS:
        measurement.take(name, partial(_training_figures, name, report))
