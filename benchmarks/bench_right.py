# SPDX-License-Identifier: Apache-2.0
"""Whether graphs are right, and what that costs: bits, calls as hosts make them, the host's time.

Bits are those of a training that knows nothing of the plugin, in mode `eager` and in mode `graph`: every loss
and every gradient of every step. Each part runs in a process of its own.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.bench_replay import cost_figures
from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.figures import Measurement, plain
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import answer_ours
from benchmarks.subjects.right import BITS, HOST_STEPS, HOSTS, MODES, STEPS, measure_bits, measure_host

TIMEOUT_SECONDS = 300
# Read when cuBLAS starts, and when an attention module is made.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def bits_figures(name: str, answer: Answer) -> list[Figure]:
    """What differs from the unpatched run, and how much of it was replayed."""
    figures = []
    for mode in MODES:
        for what in ("losses", "gradients"):
            title = f"{name}: {what} of {STEPS} steps that differ from an unpatched run's, mode {mode}"
            figures.append(Figure(name=title, value=answer[mode][what], unit=f"of {answer[what]}", bar=0))
    report = answer["graph"]["report"]
    share = report["replays"] / report["calls"]
    return [*figures, *plain(name, {"share of layer calls replayed, mode graph": (share, "1")})]


def host_figures(name: str, report: Mapping[str, Any]) -> list[Figure]:
    """Layer calls: replayed, and eager by reason."""
    title = f"{name}, {HOSTS[name].phase}, {HOST_STEPS} steps: layer calls"
    counts = {"all": report["calls"], "replayed": report["replays"]}
    counts |= {f"eager, {reason}": count for reason, count in report["eager"].items()}
    return plain(title, {what: (count, "calls") for what, count in counts.items()})


def measure(measurement: Measurement) -> None:
    """Measures bits, calls and costs."""
    ask = partial(measure_part, __name__, timeout=TIMEOUT_SECONDS, environment=ENVIRONMENT)
    parts = {name: partial(lambda name: bits_figures(name, ask(name)), name) for name in BITS}
    parts |= {name: partial(lambda name: host_figures(name, ask(name)), name) for name in HOSTS}
    measurement.take_side_by_side(parts)
    measurement.take("costs", lambda: cost_figures(measure_part("benchmarks.bench_replay", "costs")))


def answer(name: str) -> None:
    """A training, or a host's calls."""
    import torch

    torch.use_deterministic_algorithms(True)
    answer_ours(partial(measure_bits, BITS[name]) if name in BITS else partial(measure_host, HOSTS[name]))
