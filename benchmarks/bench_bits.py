# SPDX-License-Identifier: Apache-2.0
"""Whether graphs are right, and what that costs: bits, calls as hosts make them, the host's time.

Bits are those of a training that knows nothing of the plugin, in mode `eager` and in mode `graph`: every loss
and every gradient of every step. Each part runs in a process of its own.
"""

from functools import partial

from benchmarks.bench_replay import cost_figures
from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.figures import Measurement, counts_of_calls, plain
from benchmarks.measuring.results import Figure
from benchmarks.subjects.bits import BITS, HOST_STEPS, HOSTS, MODES, STEPS, measure_bits, measure_host
from benchmarks.subjects.hosts import answer_ours

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


def host_figures(name: str, report: Answer) -> list[Figure]:
    """Layer calls: replayed, and eager by reason."""
    return counts_of_calls(f"{name}, {HOSTS[name].phase}, {HOST_STEPS} steps", report)


def measure(measurement: Measurement) -> None:
    """Measures bits, calls and costs."""
    ask = partial(measure_part, __name__, timeout=TIMEOUT_SECONDS, environment=ENVIRONMENT)
    parts = {**dict.fromkeys(BITS, bits_figures), **dict.fromkeys(HOSTS, host_figures)}
    measurement.take_side_by_side(parts, ask)
    measurement.take("costs", lambda: cost_figures(measure_part("benchmarks.bench_replay", "costs")))


def answer(name: str) -> None:
    """A training, or a host's calls."""
    import torch

    torch.use_deterministic_algorithms(True)
    answer_ours(partial(measure_bits, BITS[name]) if name in BITS else partial(measure_host, HOSTS[name]))
