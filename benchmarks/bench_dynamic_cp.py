# SPDX-License-Identifier: Apache-2.0
"""Packs that ranks share in groups of several sizes: memory of their graphs, trainings, a long document.

Pools of several sizes stand beside those of the largest alone, in a simulation on one GPU: shapes, kernels
and pools are those of one rank of eight, the other ranks a pretence. The rest is of real ranks. Where there
is one GPU they share it, and what they send goes over sockets: such times compare ways to train with each
other, and tell nothing of ranks on GPUs of their own. Where there are two, these run a long document, too.
Each part runs in a process of its own.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch

from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.clocks import MIB
from benchmarks.measuring.figures import Measurement, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import Parts, answering, of_slowest, on_ranks
from benchmarks.subjects.packs import model_options
from benchmarks.subjects.sharing import measure_pools, run_document, train

POOLS = model_options(2048, layers=8, tokens=8192, head_dim=128)
POOLS_NAME = "hidden 2048, 8 layers, 8192 rows a rank"
SETS = ((1, 2), (1, 2, 4), (1, 2, 4, 8))
SLACK, SHARE = 1.10, 0.6
RANKS = 2
TRAINED = model_options(2048, layers=8, tokens=4096, head_dim=128)
TRAINING = "4096 rows each, hidden 2048, 8 layers, documents of mlm-dcp"
TRAININGS = {"dynamic CP": False, "static CP=2": True}
LONG = model_options(2048, layers=4, tokens=65536, head_dim=128)
LONG_NAME = "hidden 2048, 4 layers, one document of 65536 tokens"
HOW = ("eager", "graphed")


def _trained(is_static: bool) -> Answer:
    return of_slowest(on_ranks(RANKS, partial(train, is_static=is_static), TRAINED), *HOW)


def _long() -> Answer:
    ranks = on_ranks(RANKS, run_document, LONG)
    return of_slowest(ranks, *ranks[0])


def _words(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


PARTS: Parts = {
    **{_words(of): partial(measure_pools, POOLS, of) for every in SETS for of in (every, every[-1:])},
    **{way: partial(_trained, is_static) for way, is_static in TRAININGS.items()},
    LONG_NAME: _long,
}
answer = answering(PARTS)


def _measured_pools(words: str) -> Answer:
    *_, largest = words.split(", ")
    return {"every": measure_part(__name__, words), "alone": measure_part(__name__, largest)}


def _pool_figures(words: str, found: Answer) -> list[Figure]:
    every, alone = found["every"], found["alone"]["pools"] / MIB
    name = f"{POOLS_NAME}, simulated sizes {words}"
    rival = {"rival": f"size {words.split(', ')[-1]} alone", "rival_value": alone, "bar": SLACK * alone}
    return [
        Figure(name=f"{name}: pools of the graphs", value=every["pools"] / MIB, unit="MiB", **rival),
        Figure(name=f"{name}: graphs", value=every["graphs"], unit="graphs"),
    ]


def _ranks() -> str:
    """How many, and whose GPUs they are on."""
    return f"{RANKS} ranks {'on GPUs of their own' if _have_gpus() else 'that share a GPU'}"


def _have_gpus() -> bool:
    return torch.cuda.device_count() >= RANKS


def _training_figures(way: str) -> list[Figure]:
    figures, found = [], measure_part(__name__, way)
    for how in HOW:
        name = f"{_ranks()}, {TRAINING}, {way}, {how}"
        speed = 1e3 * sum(found["tokens"]) / sum(found[how])
        figures.append(timed(f"{name}: a step, median", found[how], "ms"))
        figures.append(Figure(name=f"{name}: tokens a second", value=speed, unit="tokens/s"))
    return figures


def _long_figures() -> list[Figure]:
    found, figures = measure_part(__name__, LONG_NAME), []
    for how in HOW:
        alone = median(found[f"1 {how}"])
        rival = {"rival": "one rank", "rival_value": alone, "bar": SHARE * alone}
        title = f"{LONG_NAME}, {how}: a step of {_ranks()}, median"
        figures.append(timed(title, found[f"{RANKS} {how}"], "ms", **rival))
    return figures


def measure(measurement: Measurement) -> None:
    """Measures every set of sizes, trainings, and a long document."""
    measurement.take_side_by_side(dict.fromkeys(map(_words, SETS), _pool_figures), _measured_pools)
    for way in TRAININGS:
        measurement.take(way, partial(_training_figures, way))
    if _have_gpus():
        measurement.take(LONG_NAME, _long_figures)
