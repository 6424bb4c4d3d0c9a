# SPDX-License-Identifier: Apache-2.0
"""Shows the figures of a benchmark as a table, and writes them as its result."""

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measuring.children import described
from benchmarks.measuring.environment import ROOT, describe_environment
from benchmarks.measuring.results import Comparison, Figure, Result, write_result

RESULTS = ROOT / "benchmarks" / "results"
Part = Callable[[], Iterable[Figure]]


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


def publish(path: Path, figures: Sequence[Figure], comparison: Comparison | None = None) -> None:
    """Prints the figures and writes them to `path`."""
    show(path.stem, figures)
    environment = describe_environment()
    write_result(path, Result(environment=environment, figures=tuple(figures), comparison=comparison))
    said = "" if comparison is None else f"; bit-equal: {comparison.bitwise_equal}"
    print(f"wrote {path}{said}", flush=True)


class Measurement:
    """The figures of one benchmark, part by part. A part that fails is named, and the others stay.

    Args:
        path: of its result.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.figures: list[Figure] = []
        self._failures: list[str] = []

    def take(self, what: str, part: Part) -> None:
        """Measures a part."""
        try:
            self.figures += list(part())
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._failures.append(f"{what}: {described(error)}")

    def publish(self) -> None:
        """Publishes what there is. Raises `RuntimeError` where a part failed, naming each."""
        if self.figures:
            publish(self.path, self.figures)
        if self._failures or not self.figures:
            raise RuntimeError("; ".join(self._failures) or "nothing was measured")
