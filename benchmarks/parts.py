# SPDX-License-Identifier: Apache-2.0
"""Parts of a benchmark in processes of their own, rivals that may fail, and repeated timings as JSON."""

import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megagraph import results

__all__ = ["Answer", "against", "caught", "measure_part", "spread", "spreads", "try_part"]

Answer = dict[str, Any]

_LONGEST_ERROR = 200


def caught(measure: Callable[[], Answer]) -> Answer:
    """What a rival's measurement answers; where it raises, `{"error": ...}` in one short line."""
    try:
        return measure()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}"[:_LONGEST_ERROR]}
    finally:
        gc.collect()


def measure_part(module: str, part: str, *, timeout: int = 240) -> Answer:
    """Runs `python -m MODULE PART` and parses its last line.

    Raises:
        RuntimeError: if it fails or answers nothing.
    """
    command = [sys.executable, "-m", module, part]
    print("$", " ".join(command[1:]), flush=True)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{module} {part}: not done after {timeout} s") from error
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"{module} {part}: ended with {done.returncode}")
    answer: Answer = json.loads(lines[-1])
    return answer


def try_part(module: str, part: str, names: Sequence[str]) -> dict[str, Answer]:
    """As `measure_part()`, of rivals: where the process fails, each of `names` answers with the error."""
    answer = caught(lambda: measure_part(module, part))
    return dict.fromkeys(names, answer) if "error" in answer else answer


def spread(times: Sequence[float], divisor: float = 1) -> dict[str, float]:
    """Median and fastest of timings in seconds, in microseconds each divided by `divisor`."""
    scale = 1e6 / divisor
    return {"median": statistics.median(times) * scale, "fastest": min(times) * scale}


def spreads(
    sample: Callable[[], dict[str, float]], *, repeats: int, warm_up: int = 5, divisor: float = 1
) -> dict[str, dict[str, float]]:
    """Repeats `sample`, which answers the seconds of each of its phases; the spread of each phase.

    Args:
        sample: one round.
        repeats: rounds that count.
        warm_up: rounds before them.
        divisor: of every time.
    """
    for _ in range(warm_up):
        sample()
    rounds = [sample() for _ in range(repeats)]
    return {phase: spread([each[phase] for each in rounds], divisor) for phase in rounds[0]}


def against(
    name: str,
    value: float,
    unit: str,
    rival: str,
    answer: Answer,
    read: Callable[[Answer], float],
    **more: Any,
) -> results.Figure:
    """A figure beside a rival's, or beside why the rival has none.

    Args:
        name: of the figure.
        value: ours.
        unit: of both.
        rival: who it is.
        answer: what the rival's measurement answered.
        read: takes the rival's value from it.
        more: further fields of the figure.
    """
    if "error" in answer:
        return results.Figure(name=name, value=value, unit=unit, rival=f"{rival}: {answer['error']}", **more)
    return results.Figure(name=name, value=value, unit=unit, rival=rival, rival_value=read(answer), **more)
