# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.table NAME [WORDS]`: the figures of results/NAME.json as a table for the docs.

With words, of those figures whose names contain them.
"""

import sys
from collections.abc import Iterable

from benchmarks.measuring.figures import RESULTS
from benchmarks.measuring.results import Figure, read_result

_HEAD = ("figure", "value", "10 - 90 %", "beside", "bar")


def rows_of(figures: Iterable[Figure]) -> list[str]:
    """Markdown, a line for each figure."""
    rows = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for figure in figures:
        spread = "" if figure.p10 is None else f"{figure.p10:.3g} - {figure.p90:.3g}"
        rival = "" if figure.rival_value is None else f"{figure.rival}: {figure.rival_value:,.4g}"
        bar = "" if figure.bar is None else f"{figure.bar:,.4g}, {'holds' if figure.holds else 'missed'}"
        value = f"{figure.value:,.4g} {figure.unit}"
        rows.append(f"| {figure.name} | {value} | {spread} | {rival} | {bar} |")
    return rows


def main() -> None:
    name, *words = sys.argv[1:]
    figures = read_result(RESULTS / f"{name}.json").figures
    print("\n".join(rows_of(figure for figure in figures if all(word in figure.name for word in words))))


if __name__ == "__main__":
    main()
