# SPDX-License-Identifier: Apache-2.0
"""Draws a training step: `python -m benchmarks.plot` writes docs/images/step.svg from its result.

Needs matplotlib (`pip install --group plot`) and no GPU. The same result gives the same bytes.
"""

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring.results import RESULTS, Figure, read_result

IMAGE = Path("docs/images/step.svg")
OURS = "megagraph"
_COLOURS = ("#1b6ca8", "#d98324", "#8a8d91", "#6a994e", "#9d4edd", "#c1121f")


def rows_of(figures: Sequence[Figure]) -> dict[str, dict[str, float]]:
    """The medians of steps in ms, by name: ours, and that of each rival that ran."""
    rows: dict[str, dict[str, float]] = {}
    for figure in figures:
        if figure.unit == "ms" and figure.name.endswith("step, median"):
            row = rows.setdefault(figure.name, {OURS: figure.value})
            if figure.rival is not None and figure.rival_value is not None:
                row[figure.rival] = figure.rival_value
    return rows


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    """Draws a group of bars for each step."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    everyone = list(dict.fromkeys(who for row in rows.values() for who in row))
    with pyplot.style.context(["default", {"svg.hashsalt": OURS, "svg.fonttype": "none", "font.size": 9}]):
        figure, axes = pyplot.subplots(
            figsize=(10, 1 + 0.3 * sum(map(len, rows.values()))), layout="constrained"
        )
        top, ticks, legend = 0.0, [], {}
        for row in rows.values():
            for place, (who, value) in enumerate(row.items()):
                colour = _COLOURS[everyone.index(who) % len(_COLOURS)]
                legend[who] = axes.barh(top - place, value, 0.85, color=colour)
                axes.text(value, top - place, f" {value:.3g}", va="center", fontsize=7)
            ticks.append(top - (len(row) - 1) / 2)
            top -= len(row) + 0.6
        axes.set_yticks(ticks, ["\n".join(textwrap.wrap(name, 60)) for name in rows])
        axes.set(title="forward_backward_func of a training step, median", xlabel="ms")
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=2, frameon=False)
        pyplot.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    source = Path(os.environ.get("OUT", RESULTS), "step.json")
    draw(rows_of(read_result(source).figures), IMAGE)
    print(f"wrote {IMAGE}", flush=True)
