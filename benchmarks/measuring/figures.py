# SPDX-License-Identifier: Apache-2.0
"""Makes figures of timings, beside rivals that may have failed, and shows and writes those of a benchmark."""

import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import sub, truediv
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measuring.children import Answer, described
from benchmarks.measuring.environment import ROOT, describe_environment
from benchmarks.measuring.results import Comparison, Figure, Result, write_result

RESULTS = ROOT / "benchmarks" / "results"
Times = Sequence[float]

_AT_ONCE = 8


def timed(name: str, times: Times, unit: str, *, value: float | None = None, **more: Any) -> Figure:
    """A figure of repeated timings: their median, or `value`, and the 10th and the 90th percentile."""
    middle, low, high = (
        median(times) if value is None else value,
        percentile(times, 10),
        percentile(times, 90),
    )
    return Figure(name=name, value=middle, unit=unit, p10=low, p90=high, **more)


def timed_ratio(name: str, above: Times, below: Times, unit: str, **more: Any) -> Figure:
    """The ratio of two medians, with the percentiles of the ratios of the pairs."""
    value = median(above) / median(below)
    return timed(name, ratios(above, below), unit, value=value, **more)


def plain(where: str, values: Mapping[str, tuple[float, str]]) -> list[Figure]:
    """Figures of values and their units, by what they are of."""
    return [Figure(name=f"{where}: {what}", value=of, unit=unit) for what, (of, unit) in values.items()]


def counts_of_calls(title: str, report: Mapping[str, Any]) -> list[Figure]:
    """Layer calls of a report: all, replayed, and eager by reason."""
    counts = {"all": report["calls"], "replayed": report["replays"]}
    counts |= {f"eager, {reason}": count for reason, count in report["eager"].items()}
    return plain(f"{title}: layer calls", {what: (count, "calls") for what, count in counts.items()})


def percentile(times: Times, percent: float) -> float:
    """Between the two samples around it, linearly."""
    ordered, place = sorted(times), (len(times) - 1) * percent / 100
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place % 1)


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


def show(title: str, figures: Sequence[Figure]) -> None:
    """Prints ours, its spread, the rival, their ratio and the floor, a line for each figure."""
    columns = ("figure", "ours", "10 - 90 %", "unit", "bar", "rival", "its", "ours / its", "floor")
    table = Table(*columns, title=title)
    for figure in figures:
        rival = figure.rival_value
        table.add_row(
            figure.name,
            f"{figure.value:.4g}",
            "" if figure.p10 is None else f"{figure.p10:.3g} - {figure.p90:.3g}",
            figure.unit,
            "" if figure.bar is None else f"{figure.bar:.4g} {'holds' if figure.holds else 'MISSED'}",
            figure.rival or "",
            "" if rival is None else f"{rival:.4g}",
            "" if not rival else f"{figure.value / rival:.3g}",
            "" if figure.floor is None else f"{figure.floor:.4g}",
        )
    Console(width=None if os.environ.get("COLUMNS") else 200).print(table)


def _write(path: Path, figures: Sequence[Figure], comparison: Comparison | None = None) -> None:
    environment = describe_environment()
    write_result(path, Result(environment=environment, figures=tuple(figures), comparison=comparison))


def publish(path: Path, figures: Sequence[Figure], comparison: Comparison | None = None) -> None:
    """Prints the figures and writes them to `path`."""
    show(path.stem, figures)
    _write(path, figures, comparison)
    said = "" if comparison is None else f"; bit-equal: {comparison.bitwise_equal}"
    print(f"wrote {path}{said}", flush=True)


def _figures_of(
    figures_of: Callable[[str, Answer], Iterable[Figure]], name: str, answer: Future[Answer]
) -> Iterable[Figure]:
    return figures_of(name, answer.result())


class Measurement:
    """The figures of one benchmark, part by part: each is written at once, however the rest fares.

    A part that fails is named, and the others stay.
    """

    def __init__(self, path: Path) -> None:
        self.path = path  # of its result
        self.figures: list[Figure] = []
        self._failures: list[str] = []

    def take(self, what: str, part: Callable[[], Iterable[Figure]]) -> None:
        """Measures a part."""
        try:
            self.figures += list(part())
            _write(self.path, self.figures)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._failures.append(f"{what}: {described(error)}")

    def take_side_by_side(
        self,
        parts: Mapping[str, Callable[[str, Answer], Iterable[Figure]]],
        ask: Callable[[str], Answer],
    ) -> None:
        """Measures parts that time nothing, several at once.

        Args:
            parts: by name, what makes figures of the name and the answer.
            ask: answers for a name, from a process of its own.
        """
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = {name: pool.submit(ask, name) for name in parts}
            for name, figures_of in parts.items():
                self.take(name, partial(_figures_of, figures_of, name, answers[name]))

    def publish(self) -> None:
        """Publishes what there is. Raises `RuntimeError` where a part failed, naming each."""
        if self.figures:
            publish(self.path, self.figures)
        if self._failures or not self.figures:
            raise RuntimeError("; ".join(self._failures) or "nothing was measured")
