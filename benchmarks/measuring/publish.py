# SPDX-License-Identifier: Apache-2.0
"""Shows the figures of a benchmark as a table, and writes them as its result."""

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measuring.compare import described
from megagraph import results

Part = Callable[[], Iterable[results.Figure]]


def result_path(name: str) -> Path:
    """benchmarks/results/NAME.json, or NAME.json in the folder that the variable OUT names."""
    return Path(os.environ.get("OUT", Path(__file__).parent.parent / "results"), f"{name}.json")


def show(title: str, figures: Sequence[results.Figure]) -> None:
    """Prints ours, the rival, their ratio and the floor, a line for each figure."""
    table = Table("figure", "ours", "unit", "bar", "rival", "its", "ours / its", "floor", title=title)
    for figure in figures:
        rival = figure.rival_value
        table.add_row(
            figure.name,
            f"{figure.value:.4g}",
            figure.unit,
            "" if figure.bar is None else f"{figure.bar:.4g} {'holds' if figure.holds else 'MISSED'}",
            figure.rival or "",
            "" if rival is None else f"{rival:.4g}",
            "" if not rival else f"{figure.value / rival:.3g}",
            "" if figure.floor is None else f"{figure.floor:.4g}",
        )
    Console(width=None if os.environ.get("COLUMNS") else 200).print(table)


def publish(
    name: str, figures: Sequence[results.Figure], comparison: results.Comparison | None = None
) -> None:
    """Prints the figures and writes them to `result_path(name)`."""
    show(name, figures)
    result = results.Result(
        environment=results.describe_environment(), figures=tuple(figures), comparison=comparison
    )
    path = result_path(name)
    result.write(path)
    said = "" if comparison is None else f"; bit-equal: {comparison.bitwise_equal}"
    print(f"wrote {path}{said}", flush=True)


class Measurement:
    """The figures of one benchmark, part by part. A part that fails is named, and the others stay.

    Args:
        name: of the benchmark.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._figures: list[results.Figure] = []
        self._failures: list[str] = []

    def take(self, what: str, part: Part) -> bool:
        """Measures a part; whether it succeeded."""
        try:
            found = list(part())
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._failures.append(f"{what}: {described(error)}")
            return False
        self._figures += found
        return True

    def take_side_by_side(self, parts: Mapping[str, Part], workers: int) -> None:
        """Measures parts at the same time, up to `workers` of them."""
        with ThreadPoolExecutor(workers) as pool:
            started = {what: pool.submit(part) for what, part in parts.items()}
        for what, part in started.items():
            self.take(what, part.result)

    def publish(self, comparison: results.Comparison | None = None) -> None:
        """Publishes what there is.

        Raises:
            RuntimeError: where a part failed, naming each; what was measured is written.
        """
        if self._figures:
            publish(self._name, self._figures, comparison)
        if self._failures:
            raise RuntimeError("; ".join(self._failures))
        if not self._figures:
            raise RuntimeError("nothing was measured")
