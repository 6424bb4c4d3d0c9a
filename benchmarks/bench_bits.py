# SPDX-License-Identifier: Apache-2.0
"""Whether graphs are right, of whole layers and of attention, MLP or both.

Losses and gradients of every step stand beside those of a training that knows nothing of the plugin, in mode
`eager` and in mode `graph`. Each training runs in a process of its own.
"""

from functools import partial

import torch

from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.figures import Measurement, plain
from benchmarks.measuring.results import Figure
from benchmarks.subjects.bits import BITS, MODES, BitsCase, measure_bits
from benchmarks.subjects.hosts import DETERMINISTIC, Parts, answering


def _measured(case: BitsCase) -> Answer:
    torch.use_deterministic_algorithms(True)
    return measure_bits(case)


PARTS: Parts = {name: partial(_measured, case) for name, case in BITS.items()}
answer = answering(PARTS)


def figures_of(name: str, answer: Answer) -> list[Figure]:
    """What differs from the unpatched run, and how much of it was replayed."""
    figures = []
    for mode in MODES:
        for what in ("losses", "gradients"):
            title = (
                f"{name}: {what} of {BITS[name].steps} steps that differ from an unpatched run's, mode {mode}"
            )
            figures.append(Figure(name=title, value=answer[mode][what], unit=f"of {answer[what]}", bar=0))
    report = answer["graph"]["report"]
    share = report["replays"] / report["calls"]
    return [*figures, *plain(name, {"share of layer calls replayed, mode graph": (share, "1")})]


def measure(measurement: Measurement) -> None:
    """Measures all trainings side by side."""
    ask = partial(measure_part, __name__, environment=DETERMINISTIC)
    measurement.take_side_by_side(dict.fromkeys(BITS, figures_of), ask)
