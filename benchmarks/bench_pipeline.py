# SPDX-License-Identifier: Apache-2.0
"""Pipelines: memory of a stage, and trainings of two ranks. Each part runs in a process of its own.

Memory is of one stage in one process, with random activations in place of what stages send ("one stage
alone"). The trainings are of real ranks, with deterministic algorithms; where there is one GPU they share it,
and what they send goes over sockets: such times tell nothing of ranks on GPUs of their own.
"""

from functools import partial

import torch

from benchmarks.measuring.children import Parts, measure_part, parts_of
from benchmarks.measuring.results import FOLDER, Figure, against, in_mib, timed
from benchmarks.subjects import pipelines
from benchmarks.subjects.hosts import DETERMINISTIC
from benchmarks.subjects.packs import model_options
from benchmarks.subjects.pipelines import Cut

MEMORY = {
    "stage 0 of PP=4, 12 layers": Cut(stages=4),
    "stage 0 of PP=4, 2 chunks of 6 layers": Cut(stages=4, chunks=2),
}
MEMORY_MODEL = model_options(1024, layers=48, tokens=4096)
MODEL = model_options(1024, layers=8, tokens=2048)
HOW = ("eager", "graphed")
PEAK = 1.10
TRAININGS = {
    f"{name}, {layers} layers": (cut, layers)
    for name, cut in {"PP=2": Cut(), "PP=2, 2 chunks a stage": Cut(chunks=2)}.items()
    for layers in pipelines.LAYERS
}
RANKS = 2
PARTS: Parts = {
    **parts_of(partial(pipelines.measure_memory, MEMORY_MODEL), MEMORY, HOW),
    **{
        name: partial(pipelines.train, MODEL, *training, FOLDER / "pipeline_report.json")
        for name, training in TRAININGS.items()
    },
}


def _memory_figures(name: str) -> list[Figure]:
    eager, graphed = (measure_part(__name__, f"{name}: {how}") for how in HOW)
    title = f"one stage alone, {name}, hidden 1024, full packs of 4096"
    peak = in_mib(f"{title}: peak memory reserved", graphed["reserved"])
    return [
        against(peak, "eager, the same order", eager["reserved"], share=PEAK),
        Figure(name=f"{title}: slots of all chunks", value=graphed["slots"], unit="slots"),
    ]


def _training_figures(name: str) -> list[Figure]:
    found = measure_part(__name__, name, environment=DETERMINISTIC, ranks=RANKS)
    whose = "on GPUs of their own" if torch.cuda.device_count() >= RANKS else "that share a GPU"
    title = f"{RANKS} ranks {whose}, {name}, hidden 1024, 8 layers, packs of up to 2048"
    differ = f"{title}, {pipelines.STEPS} steps: values that differ from eager"
    return [
        *(timed(f"{title}, {how}: a step, median", found[how], "ms") for how in HOW),
        Figure(name=differ, value=found["differing"], unit="values", bar=0),
    ]


FIGURES = {
    **{name: partial(_memory_figures, name) for name in MEMORY},
    **{name: partial(_training_figures, name) for name in TRAININGS},
}
