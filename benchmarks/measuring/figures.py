# SPDX-License-Identifier: Apache-2.0
"""Makes figures of timings, and sets them beside rivals that may have failed."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import sub, truediv
from typing import Any

from benchmarks.measuring.children import Answer
from benchmarks.measuring.results import Figure

Times = Sequence[float]


def timed(name: str, times: Times, unit: str, *, value: float | None = None, **more: Any) -> Figure:
    """A figure of repeated timings: their median, or `value`, and the 10th and the 90th percentile."""
    middle = statistics.median(times) if value is None else value
    return Figure(
        name=name, value=middle, unit=unit, p10=percentile(times, 10), p90=percentile(times, 90), **more
    )


def timed_ratio(name: str, above: Times, below: Times, unit: str, **more: Any) -> Figure:
    """The ratio of two medians, with the percentiles of the ratios of the pairs."""
    value = statistics.median(above) / statistics.median(below)
    return timed(name, ratios(above, below), unit, value=value, **more)


def plain(where: str, values: Mapping[str, tuple[float, str]]) -> list[Figure]:
    """Figures of values and their units, by what they are of."""
    return [Figure(name=f"{where}: {what}", value=of, unit=unit) for what, (of, unit) in values.items()]


def percentile(times: Times, percent: float) -> float:
    """Between the two samples around it, linearly."""
    ordered = sorted(times)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def ratios(above: Times, below: Times) -> list[float]:
    """Of paired samples. Raises `ValueError` if there are not as many of one as of the other."""
    return [truediv(*pair) for pair in zip(above, below, strict=True)]


def differences(more: Times, less: Times) -> list[float]:
    """Of paired samples. Raises `ValueError` if there are not as many of one as of the other."""
    return [sub(*pair) for pair in zip(more, less, strict=True)]


def beside(figure: Figure, rival: str, answer: Answer, read: Callable[[Answer], float]) -> Figure:
    """A figure beside what `read` takes from a rival's answer, or beside why the rival has none."""
    if "error" in answer:
        return replace(figure, rival=f"{rival}: {answer['error']}")
    return replace(figure, rival=rival, rival_value=read(answer))


def beside_each(
    figure: Figure, rivals: Mapping[str, Answer], read: Callable[[Answer], float]
) -> list[Figure]:
    """One figure beside each of several rivals; the bar, which is one, stands on the first."""
    rows = [beside(figure, rival, answer, read) for rival, answer in rivals.items()]
    return [*rows[:1], *(replace(row, bar=None) for row in rows[1:])]
