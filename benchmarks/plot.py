# SPDX-License-Identifier: Apache-2.0
"""Draws benchmarks/results/*.json: `python -m benchmarks.plot [NAME ...] [--out FOLDER]`, an image a name.

Needs matplotlib (`pip install --group plot`) and no GPU. The same results give the same bytes.
"""

import argparse
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measuring.figures import RESULTS
from benchmarks.measuring.results import Figure, read_result

OURS = "megagraph"
_COLOURS = ("#d98324", "#8a8d91", "#6a994e", "#9d4edd", "#c1121f", "#5e503f", "#2a9d8f", "#e0a100")
_PAPER = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.3}  # under numbers, on lines


class Drawing(NamedTuple):
    """What to draw of the result of the same name."""

    title: str
    unit: str  # figures of this unit only
    pick: str  # figures whose name matches


_BIG = "Attention captured for 256 documents, of which ten are there: GPU time"
_SHARE = "RoPE of packs: share of a device copy's bandwidth"
DRAWINGS = {
    "step": Drawing("forward_backward_func of a training step, median", "ms", "step, median$"),
    "rope": Drawing(_SHARE, "share", "(64|320) MiB, NeoX, forward, warm"),
    "attention": Drawing(_BIG, "us", "document slots.*, beside ATen alone$"),
}


def rows_of(drawing: Drawing, figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    """The figures to draw, by name: one of each rival."""
    rows: dict[str, list[Figure]] = {}
    for figure in figures:
        if figure.unit == drawing.unit and re.search(drawing.pick, figure.name):
            rows.setdefault(figure.name, []).append(figure)
    return rows


def draw(name: str, figures: Sequence[Figure], path: Path) -> None:
    """Draws one result as bars, a group for each figure. Raises `ValueError` where there is none to draw."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    drawing = DRAWINGS[name]
    rows = rows_of(drawing, figures)
    if not rows:
        raise ValueError(f"result {name!r}: expected figures to draw, found none of {drawing}")
    settings = {"svg.hashsalt": "megagraph", "svg.fonttype": "none", "font.size": 9}
    with pyplot.style.context(["default", settings]):
        bars = sum(2 + sum(each.rival is not None for each in row) for row in rows.values())
        figure, axes = pyplot.subplots(figsize=(10, 1.4 + 0.24 * bars), layout="constrained")
        _draw_rows(axes, rows)
        axes.set(title=drawing.title, xlabel=drawing.unit)
        axes.margins(x=0.12, y=0.01)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        handles, labels = axes.get_legend_handles_labels()
        legend = dict(zip(labels, handles, strict=True))  # names each thing once
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=2, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        pyplot.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _draw_rows(axes: Any, rows: dict[str, list[Figure]]) -> None:
    """Draws groups of bars from the top down; a rival that refused says why in place of its bar."""
    ticks, top, colours = [], 0.0, {OURS: "#1b6ca8"}
    for row in rows.values():
        bars = [(OURS, row[0].value), *((each.rival, each.rival_value) for each in row if each.rival)]
        for index, (who, value) in enumerate(bars):
            place = top - index
            style: dict[str, Any] = {"va": "center", "fontsize": 7, "bbox": _PAPER}
            if value is None:
                axes.text(0.01, place, who[:100], **style, transform=axes.get_yaxis_transform())
                continue
            colour = colours.setdefault(who, _COLOURS[(len(colours) - 1) % len(_COLOURS)])
            axes.barh(place, value, 0.85, color=colour, label=who)
            said = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
            axes.text(value, place, f" {said}", **style)
        bottom = top - len(bars) + 0.5
        for key, text, line in (("bar", "to reach", "--"), ("floor", "floor", "-")):
            limits = [limit for each in row if (limit := getattr(each, key)) is not None and limit > 0]
            if limits:
                axes.plot(limits[-1:] * 2, [top + 0.5, bottom], line, color="black", label=text)
        ticks.append(top - (len(bars) - 1) / 2)
        top -= len(bars) + 0.6
    axes.set_yticks(ticks, ["\n".join(textwrap.wrap(name, 60)) for name in rows])


def main() -> None:
    """Draws the named results, by default all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot")
    names = ", ".join(DRAWINGS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {names}; default: all")
    images = Path("docs/images")
    parser.add_argument("--out", type=Path, default=images, help=f"folder, {images} by default")
    options = parser.parse_args()
    for name in options.names or DRAWINGS:
        if name not in DRAWINGS:
            parser.error(f"expected one of {names}, got {name!r}")
        source, target = Path(os.environ.get("OUT", RESULTS), f"{name}.json"), options.out / f"{name}.svg"
        if not source.exists():
            parser.error(f"{source} is missing: `python -m benchmarks {name}` writes it")
        try:
            draw(name, read_result(source).figures, target)
        except ModuleNotFoundError as error:
            parser.error(f"drawing needs matplotlib: pip install --group plot ({error})")
        print(f"wrote {target}", flush=True)


if __name__ == "__main__":
    main()
