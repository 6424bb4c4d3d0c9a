# SPDX-License-Identifier: Apache-2.0
"""What it costs to notice every change and to verify graphs; and that there are no false alarms.

A stack of 24 layers of hidden 1024, of our attention and of Transformer Engine's modules; and hosts that
train a small model for 1,000 steps. Each part runs in a process of its own.
"""

from functools import partial

from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.figures import Measurement, plain, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects import guards, layers
from benchmarks.subjects.bits import LAYER_KINDS
from benchmarks.subjects.hosts import answer_ours
from benchmarks.subjects.packs import model_options

HIDDEN = 1024
TIMEOUT_SECONDS = 400
BARS = {"call": 1.0, "step": 8.0}  # us a layer
COSTS = {f"costs, {name}": name for name in LAYER_KINDS}


def cost_figures(name: str, answer: Answer) -> list[Figure]:
    """Guards before a call and before a step, and a verification beside an eager micro-batch."""
    figures = []
    for what, bar in BARS.items():
        title = f"guards before a {what}, {name}, of a layer"
        for how in ("hot", "idle"):
            figures.append(timed(f"{title}, {how}, median", answer["times"][f"{what}, {how}"], "us", bar=bar))
    verification = answer["verification"]
    each = verification["seconds"] / verification["verified"]
    title = f"verification of a variant, {name}, {layers.LAYERS} layers"
    return [
        *figures,
        Figure(
            name=title,
            value=each * 1e3,
            unit="ms",
            rival="an eager micro-batch",
            rival_value=answer["eager"] * 1e3,
        ),
        *plain(title, {"memory beside the graphs": (verification["bytes"] / 2**20, "MiB")}),
    ]


def alarm_figures(name: str, report: Answer) -> list[Figure]:
    """Calls that ran eager although nothing had changed, of how many."""
    figures = [
        Figure(name=f"{name}: {reason}", value=report["eager"].get(reason, 0), unit="calls", bar=0)
        for reason in ("STATE_CHANGED", "VERIFY_FAILED")
    ]
    counts = {"all": report["calls"], "replayed": report["replays"]}
    counts |= {"variants verified": report["verification"]["verified"]}
    return [*figures, *plain(name, {what: (count, "calls") for what, count in counts.items()})]


def measure(measurement: Measurement) -> None:
    """Measures guards, a verification, and long trainings."""
    ask = partial(measure_part, __name__, timeout=TIMEOUT_SECONDS)
    for part, name in COSTS.items():
        measurement.take(part, lambda part=part, name=name: cost_figures(name, ask(part)))  # type: ignore[misc]
    measurement.take_side_by_side(dict.fromkeys(guards.ALARMS, alarm_figures), ask)


def answer(name: str) -> None:
    """Costs, or a host."""
    if name in guards.ALARMS:
        answer_ours(partial(guards.measure_alarms, guards.ALARMS[name]))
        return
    options = model_options(HIDDEN, layers=layers.LAYERS, tokens=layers.TOKENS)
    is_engine = LAYER_KINDS[COSTS[name]]
    answer_ours(partial(guards.measure_guards, options, transformer_engine=is_engine))
