# SPDX-License-Identifier: Apache-2.0
"""Shows the figures of a benchmark as a table, and writes them as its result."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megagraph import results

__all__ = ["publish", "result_path", "show"]


def result_path(name: str) -> Path:
    """benchmarks/results/NAME.json, or NAME.json in the folder that the variable OUT names."""
    return Path(os.environ.get("OUT", Path(__file__).parent / "results"), f"{name}.json")


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
    print(f"wrote {path}", flush=True)
