# SPDX-License-Identifier: Apache-2.0
"""How many times as fast graphed steps are, over hidden size and tokens of a pack, the large models included.

Eager steps and graphed ones of the same full packs take turns, in a process for each hidden size. Four layers
each: every layer gains as much. The plugin pads neither.
"""

from functools import partial

import megagraph
from benchmarks.measuring.children import Answer, Parts, measure_part
from benchmarks.measuring.results import Figure, timed, timed_ratio
from benchmarks.subjects.steps import measure_steps, step_case

HIDDEN, TOKENS = (512, 1024, 2048, 4096), (1024, 4096, 16384)
LAYERS, ROUNDS = 4, 12
WAYS = "graphed", "eager"
GAIN = "eager / graphed"


def name_of(hidden: int, tokens: int) -> str:
    return f"hidden {hidden}, packs of {tokens}"


def measure_hidden(hidden: int) -> Answer:
    """Walls in ms of each way, by tokens."""
    answer: Answer = {}
    for tokens in TOKENS:
        case = step_case(hidden, layers=LAYERS, tokens=tokens)
        measured = measure_steps(case, *WAYS, rounds=ROUNDS, trainer={"beside": True})
        answer[str(tokens)] = {way: measured[way] for way in WAYS}
        megagraph.uninstall()
    return answer


PARTS: Parts = {f"hidden {hidden}": partial(measure_hidden, hidden) for hidden in HIDDEN}


def _figures_of(hidden: int) -> list[Figure]:
    figures = []
    for tokens, walls in measure_part(__name__, f"hidden {hidden}").items():
        name = name_of(hidden, int(tokens))
        graphed, eager = (walls[way] for way in WAYS)
        figures.append(timed_ratio(f"{name}: {GAIN}", eager, graphed, "ratio"))
        figures += [timed(f"{name}: {way} step", walls[way], "ms") for way in WAYS]
    return figures


FIGURES = {f"hidden {hidden}": partial(_figures_of, hidden) for hidden in HIDDEN}
