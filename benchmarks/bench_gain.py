# SPDX-License-Identifier: Apache-2.0
"""How many times as fast graphed steps are, over hidden size and tokens of a pack, the large models included.

Eager steps and graphed ones of the same full packs take turns, in a process for each model. Four layers each:
every layer gains as much. The plugin pads neither.
"""

import itertools
from functools import partial

from benchmarks.measuring.children import Parts, measure_part
from benchmarks.measuring.results import Figure, timed, timed_ratio
from benchmarks.subjects.steps import WAYS, measure_steps, step_case

HIDDEN, TOKENS = (512, 1024, 2048, 4096), (1024, 4096, 16384)
ROUNDS = 4
GAIN = "eager / graphed"
CASES = [step_case(hidden, layers=4, tokens=tokens) for hidden, tokens in itertools.product(HIDDEN, TOKENS)]
PARTS: Parts = {case.name: partial(measure_steps, case, rounds=ROUNDS, beside=True) for case in CASES}


def _figures_of(name: str) -> list[Figure]:
    walls = measure_part(__name__, name)
    return [
        timed_ratio(f"{name}: {GAIN}", walls["eager"], walls["graphed"], "ratio"),
        *(timed(f"{name}: {way} step", walls[way], "ms") for way in WAYS),
    ]


FIGURES = {name: partial(_figures_of, name) for name in PARTS}
