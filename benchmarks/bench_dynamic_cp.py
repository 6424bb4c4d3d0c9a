# SPDX-License-Identifier: Apache-2.0
"""Memory of graphs for packs that ranks share in groups of several sizes, beside that of the largest alone.

A simulation on one GPU: shapes and pools are those of one rank of eight, the other ranks a pretence
(`benchmarks/subjects/sharing.py`). Each set of sizes runs in a process of its own.
"""

import json
from functools import partial

from benchmarks.measuring.children import measure_part
from benchmarks.measuring.figures import Measurement
from benchmarks.measuring.results import Figure
from benchmarks.subjects.packs import model_options
from benchmarks.subjects.sharing import measure_pools
from megagraph.cli.demo import quiet_megatron

MIB = 2**20
MODEL = model_options(2048, layers=8, tokens=8192, head_dim=128)
NAME = "hidden 2048, 8 layers, 8192 rows a rank"
SETS = ((1, 2), (1, 2, 4), (1, 2, 4, 8))
SLACK = 1.10


def in_words(cp_sizes: tuple[int, ...]) -> str:
    """As an argument of a process, and in a figure's name."""
    return ", ".join(map(str, cp_sizes))


def _figures(cp_sizes: tuple[int, ...]) -> list[Figure]:
    largest = cp_sizes[-1:]
    every, alone = (measure_part(__name__, in_words(sizes)) for sizes in (cp_sizes, largest))
    name = f"{NAME}, simulated sizes {in_words(cp_sizes)}"
    bar, its = SLACK * alone["pools"] / MIB, alone["pools"] / MIB
    return [
        Figure(
            name=f"{name}: pools of the graphs",
            value=every["pools"] / MIB,
            unit="MiB",
            bar=bar,
            rival=f"size {largest[0]} alone",
            rival_value=its,
        ),
        Figure(name=f"{name}: graphs", value=every["graphs"], unit="graphs"),
    ]


def measure(measurement: Measurement) -> None:
    """Measures every set of sizes."""
    for cp_sizes in SETS:
        measurement.take(in_words(cp_sizes), partial(_figures, cp_sizes))


def answer(cp_sizes: str) -> None:
    """Pools for a set of sizes."""
    quiet_megatron()
    print(json.dumps(measure_pools(MODEL, tuple(map(int, cp_sizes.split(", "))))), flush=True)
