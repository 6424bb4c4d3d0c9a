# SPDX-License-Identifier: Apache-2.0
"""Compares ours with rivals that may fail: spreads of timings, and figures beside what others did."""

import gc
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megagraph import results

# What a measurement answers, as JSON; `{"error": ...}` where it failed.
Answer = dict[str, Any]

_LONGEST_ERROR = 200
_TRACEBACK = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank\d+\]: ?")
_ERROR_LINE = re.compile(r"([\w.]*(?:Error|Exception|Interrupt|Exit))(?::\s*(.*))?$")


def described(error: BaseException) -> str:
    """The first error of a chain in one short line: what followed it says less."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__ or error.__context__ or error
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:_LONGEST_ERROR]


def first_error(log: str) -> str:
    """The error of the first traceback in a log, with the line that raised it where it says nothing.

    Returns:
        One short line; empty where there is no traceback.
    """
    lines = [_RANK.sub("", line).rstrip() for line in log.splitlines()]
    lines = [line for line in lines if line.strip("^~ ")]  # marks below a line of code
    starts = [index for index, line in enumerate(lines) if line.strip() == _TRACEBACK]
    for index in range(starts[0] + 1, len(lines)) if starts else ():
        found = _ERROR_LINE.match(lines[index])
        if found:
            name, said = found.group(1).rpartition(".")[2], (found.group(2) or "").strip()
            return f"{name}: {said or lines[index - 1].strip()}"[:_LONGEST_ERROR]
    return ""


def caught(measure: Callable[[], Answer]) -> Answer:
    """What a rival's measurement answers; where it raises, `{"error": ...}` in one short line."""
    try:
        return measure()
    except Exception as error:
        return {"error": described(error)}
    finally:
        gc.collect()


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


def median_difference(more: Sequence[float], less: Sequence[float]) -> float:
    """Median of the differences of paired samples.

    Raises:
        ValueError: if there are not as many of one as of the other.
    """
    return statistics.median(a - b for a, b in zip(more, less, strict=True))


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the ratios of paired samples.

    Raises:
        ValueError: if there are not as many of one as of the other.
    """
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def unevenness(ratio: float) -> float:
    """How far a ratio is from 1, whichever of the two is the larger: at least 1."""
    return max(ratio, 1 / ratio)


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


def against_each(
    name: str,
    value: float,
    unit: str,
    rivals: Mapping[str, Answer],
    read: Callable[[Answer], float],
    *,
    bar: float | None = None,
    **more: Any,
) -> list[results.Figure]:
    """One figure beside each of several rivals; the bar, which is one, stands on the first."""
    return [
        against(name, value, unit, rival, answer, read, bar=None if index else bar, **more)
        for index, (rival, answer) in enumerate(rivals.items())
    ]
