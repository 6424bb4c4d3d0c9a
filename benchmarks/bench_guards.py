# SPDX-License-Identifier: Apache-2.0
"""What it costs to notice every change and to verify graphs; and that there are no false alarms.

A stack of 24 layers of hidden 1024, of our attention and of Transformer Engine's modules; and hosts that
train a small model for 1,000 steps. Each part runs in a process of its own.
"""

from functools import partial

from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.clocks import MIB
from benchmarks.measuring.figures import Measurement, plain, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects import layers
from benchmarks.subjects.guards import HOSTS, measure_guards, measure_host
from benchmarks.subjects.hosts import Parts, answering
from benchmarks.subjects.packs import LAYER_KINDS, model_options

BARS = {"call": 1.0, "step": 8.0}  # us a layer
COSTS = {
    name: partial(
        measure_guards,
        model_options(1024, layers=layers.LAYERS, tokens=layers.TOKENS),
        transformer_engine=is_engine,
    )
    for name, is_engine in LAYER_KINDS.items()
}
ALARMS = {
    f"{host}, 1000 steps, {kind}": partial(measure_host, HOSTS[host], transformer_engine=is_engine)
    for host in HOSTS
    for kind, is_engine in LAYER_KINDS.items()
}
PARTS: Parts = COSTS | ALARMS
answer = answering(PARTS)


def cost_figures(name: str, answer: Answer) -> list[Figure]:
    """Guards before a call and before a step, and a verification beside an eager micro-batch."""
    figures = [
        timed(
            f"guards before a {what}, {name}, of a layer, {how}, median",
            answer["times"][f"{what}, {how}"],
            "us",
            bar=bar,
        )
        for what, bar in BARS.items()
        for how in ("hot", "idle")
    ]
    verification, title = answer["verification"], f"verification of a variant, {name}, {layers.LAYERS} layers"
    each = verification["seconds"] / verification["verified"]
    rival = {"rival": "an eager micro-batch", "rival_value": answer["eager"] * 1e3}
    figures.append(Figure(name=title, value=each * 1e3, unit="ms", **rival))
    return [*figures, *plain(title, {"memory beside the graphs": (verification["bytes"] / MIB, "MiB")})]


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
    ask = partial(measure_part, __name__)
    for name in COSTS:
        measurement.take(f"costs, {name}", lambda name=name: cost_figures(name, ask(name)))  # type: ignore[misc]
    measurement.take_side_by_side(dict.fromkeys(ALARMS, alarm_figures), ask)
