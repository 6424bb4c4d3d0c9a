# SPDX-License-Identifier: Apache-2.0
"""Packs that ranks share in groups of several sizes: memory of their graphs, a rank's work, trainings.

Pools of several sizes stand beside those of the largest alone, and a rank's share of one long document
beside all of it. Both are a simulation on one GPU: shapes, kernels and pools are those of one rank of eight,
the other ranks a pretence (`benchmarks/subjects/sharing.py`). NCCL's own memory and the trainings are of real
ranks. Where there is one GPU they share it, and what they send goes over sockets: such times compare ways to
train with each other, and tell nothing of ranks on GPUs of their own. Where there are two, these run the long
document, too. Each part runs in a process of its own.
"""

import json
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch

from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.figures import Measurement, plain, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.communicators import measure_communicators
from benchmarks.subjects.packs import model_options
from benchmarks.subjects.ranks import on_ranks
from benchmarks.subjects.shared_steps import run_document, train
from benchmarks.subjects.sharing import measure_document, measure_pools
from megagraph.cli.demo import quiet_megatron

MIB = 2**20
MODEL = model_options(2048, layers=8, tokens=8192, head_dim=128)
NAME = "hidden 2048, 8 layers, 8192 rows a rank"
SETS = ((1, 2), (1, 2, 4), (1, 2, 4, 8))
SLACK = 1.10
# One document, on one rank and on each of two.
LONG = 65536
LONG_MODEL = "hidden 2048, 4 layers, one document of 65536 tokens"
DOCUMENT = ("document, 1, 0", "document, 2, 0", "document, 2, 1")  # of how many ranks, and which
SHARE, BALANCE = 0.6, 1.05
COMMUNICATORS = (2, 4)
RANKS = 2
TRAINED = model_options(2048, layers=8, tokens=4096, head_dim=128)
TRAINING = "4096 rows each, hidden 2048, 8 layers, documents of mlm-dcp"
TRAININGS = {"dynamic": "dynamic CP", "static": "static CP=2"}
HOW = ("eager", "graphed")


def describe(cp_sizes: tuple[int, ...]) -> str:
    """As an argument of a process, and in a figure's name."""
    return ", ".join(map(str, cp_sizes))


def _measured_pools(words: str) -> Answer:
    *_, largest = words.split(", ")
    return {"every": measure_part(__name__, words), "alone": measure_part(__name__, largest)}


def _pool_figures(words: str, found: Answer) -> list[Figure]:
    every, alone = found["every"], found["alone"]
    name = f"{NAME}, simulated sizes {words}"
    bar, its = SLACK * alone["pools"] / MIB, alone["pools"] / MIB
    return [
        Figure(
            name=f"{name}: pools of the graphs",
            value=every["pools"] / MIB,
            unit="MiB",
            bar=bar,
            rival=f"size {words.split(', ')[-1]} alone",
            rival_value=its,
        ),
        Figure(name=f"{name}: graphs", value=every["graphs"], unit="graphs"),
    ]


def _work_figures() -> list[Figure]:
    alone, *ranks = (measure_part(__name__, part) for part in DOCUMENT)
    figures = [
        Figure(
            name=f"{LONG_MODEL}, {how}: own work of rank {rank} of two, simulated",
            value=found[how],
            unit="ms",
            bar=SHARE * alone[how],
            rival="one rank alone",
            rival_value=alone[how],
        )
        for how in HOW
        for rank, found in enumerate(ranks)
    ]
    pairs = [found["pairs"] for found in ranks]
    name = f"{LONG_MODEL}: attention of the rank with more pairs of queries and keys, over the other's"
    return [*figures, Figure(name=name, value=max(pairs) / min(pairs), unit="x", bar=BALANCE)]


def _ranks(number: int) -> str:
    """So many ranks, and whose GPUs they are on."""
    return f"{number} ranks {'on GPUs of their own' if _have_gpus(number) else 'that share a GPU'}"


def _have_gpus(number: int) -> bool:
    return torch.cuda.device_count() >= number


def _communicator_figures() -> list[Figure]:
    found = measure_part(__name__, "communicators")
    name = f"NCCL's memory on each of {_ranks(max(COMMUNICATORS))}"
    return [
        Figure(name=f"{name}, groups of {size}", value=found[str(size)], unit="MiB") for size in COMMUNICATORS
    ]


def _training_figures() -> list[Figure]:
    figures = []
    for part, way in TRAININGS.items():
        found = measure_part(__name__, part)
        for how in HOW:
            name = f"{_ranks(RANKS)}, {TRAINING}, {way}, {how}"
            speed = 1e3 * sum(found["tokens"]) / sum(found[how])
            figures.append(timed(f"{name}: a step, median", found[how], "ms"))
            figures.append(Figure(name=f"{name}: tokens a second", value=speed, unit="tokens/s"))
        share = 100 * (1 - sum(found["tokens"]) / sum(found["rows"]))
        seconds = found["capture_seconds"]
        name = f"{_ranks(RANKS)}, {TRAINING}, {way}"
        figures += plain(name, {"padding": (share, "%"), "capture": (seconds, "s")})
    return figures


def _document_figures() -> list[Figure]:
    found = measure_part(__name__, "document of two ranks")
    return [
        timed(
            f"{LONG_MODEL}, {how}: a step of {_ranks(RANKS)}, median",
            found[str(RANKS)][how],
            "ms",
            bar=SHARE * median(found["1"][how]),
            rival="one rank",
            rival_value=median(found["1"][how]),
        )
        for how in HOW
    ]


def measure(measurement: Measurement) -> None:
    """Measures a long document, communicators, every set of sizes, and trainings."""
    measurement.take("a long document", _work_figures)
    measurement.take("communicators", _communicator_figures)
    pools = {describe(cp_sizes): _pool_figures for cp_sizes in SETS}
    measurement.take_side_by_side(pools, _measured_pools)
    measurement.take("trainings", _training_figures)
    if _have_gpus(RANKS):
        measurement.take("a long document of two ranks", _document_figures)


def _of_slowest(ranks: Sequence[Answer]) -> Answer:
    """What the first rank answers, with the longest wall of all in each step."""
    walls = {
        name: [*map(max, zip(*(rank[name] for rank in ranks), strict=True))] for name in ("graphed", "eager")
    }
    return {**ranks[0], **walls}


def answer(part: str) -> None:
    """Pools for a set of sizes; or a part of the rest, by name."""
    name, *numbers = part.split(", ")
    found: Answer
    if name == "communicators":
        found = on_ranks(max(COMMUNICATORS), measure_communicators, COMMUNICATORS)[0]
    elif name in TRAININGS:
        found = _of_slowest(on_ranks(RANKS, partial(train, is_static=name == "static"), TRAINED))
    elif name == "document of two ranks":
        model = model_options(2048, layers=4, tokens=LONG, head_dim=128)
        of_ranks = on_ranks(RANKS, run_document, model)
        found = {size: _of_slowest([rank[size] for rank in of_ranks]) for size in of_ranks[0]}
    else:
        quiet_megatron()
        if name == "document":
            size, rank = map(int, numbers)
            model = model_options(2048, layers=4, tokens=LONG // size, head_dim=128)
            found = measure_document(model, size, rank)
        else:
            found = measure_pools(MODEL, tuple(map(int, part.split(", "))))
    print(json.dumps(found), flush=True)
