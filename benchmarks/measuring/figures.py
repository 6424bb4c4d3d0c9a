# SPDX-License-Identifier: Apache-2.0
"""Makes figures of timings, beside rivals that may have failed, and shows and writes those of a benchmark."""

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import sub, truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.box import MARKDOWN
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
    ends = torch.tensor([0.1, 0.9], dtype=torch.float64)
    low, high = torch.tensor(times, dtype=torch.float64).quantile(ends).tolist()
    middle = median(times) if value is None else value
    return Figure(name=name, value=middle, unit=unit, p10=low, p90=high, **more)


def timed_ratio(name: str, above: Times, below: Times, unit: str, **more: Any) -> Figure:
    """The ratio of two medians, with the percentiles of the ratios of the pairs."""
    value = median(above) / median(below)
    return timed(name, ratios(above, below), unit, value=value, **more)


def plain(where: str, values: Mapping[str, tuple[float, str]]) -> list[Figure]:
    """Figures of values and their units, by what they are of."""
    return [Figure(name=f"{where}: {what}", value=of, unit=unit) for what, (of, unit) in values.items()]


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
    """Prints ours, its spread, the rival, their ratio and the floor as Markdown, a line for each figure."""
    columns = ("figure", "ours", "10 - 90 %", "unit", "bar", "rival", "its", "ours / its", "floor")
    table = Table(*columns, title=title, box=MARKDOWN)
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
        """Measures parts that time nothing, several at once: `ask` answers for a name in its own process."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = {name: pool.submit(ask, name) for name in parts}
            for name, figures_of in parts.items():
                self.take(name, lambda name=name, of=figures_of: of(name, answers[name].result()))  # type: ignore[misc]

    def publish(self) -> None:
        """Publishes what there is. Raises `RuntimeError` where a part failed, naming each."""
        if self.figures:
            publish(self.path, self.figures)
        if self._failures or not self.figures:
            raise RuntimeError("; ".join(self._failures) or "nothing was measured")
