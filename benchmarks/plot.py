# SPDX-License-Identifier: Apache-2.0
"""Draws benchmarks/results/*.json: `python -m benchmarks.plot [NAME ...] [--out FOLDER]`, an image a name.

Needs matplotlib (`pip install --group plot`) and no GPU. The same results give the same bytes.
"""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring.publish import RESULTS
from benchmarks.measuring.results import Figure, read_result

OURS = "megagraph"
_OURS_COLOUR = "#1b6ca8"
_COLOURS = ("#d98324", "#8a8d91", "#6a994e", "#9d4edd", "#c1121f", "#5e503f", "#2a9d8f", "#e0a100")
_PAPER = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.3}  # under numbers, on lines


@dataclass(frozen=True)
class Drawing:
    """What to draw of one result."""

    title: str
    result: str  # the file's name, without `.json`
    unit: str  # figures of this unit only
    pick: str  # figures whose name matches
    log: bool = False  # a logarithmic axis
    kind: str = "svg"  # of image


@dataclass(kw_only=True)
class Row:
    """One figure: ours, the rivals' values or refusals, the value to reach and the best that could be."""

    value: float
    unit: str
    rivals: dict[str, float | str] = field(default_factory=dict)
    bar: float | None = None
    floor: float | None = None


_BIG = "Attention captured for 256 documents, of which ten are there: GPU time"
_STEP = "forward_backward_func of a training step, median"
_TIMELINE = "Where a graphed step's time goes, hidden 1024, packs of 4096"
DRAWINGS = {
    "replay": Drawing(
        "Host time of a graphed layer", "replay", "us", "^host time of a graphed layer.*median$", log=True
    ),
    "step": Drawing(_STEP, "step", "ms", "step, median$"),
    "rope": Drawing(
        "RoPE of packs: share of a device copy's bandwidth",
        "rope",
        "share",
        "(64|320) MiB, NeoX, forward, warm",
    ),
    "attention": Drawing(_BIG, "attention", "us", "document slots.*, beside ATen alone$"),
    "memory": Drawing("Device memory of a training step", "memory", "MiB", "peak memory reserved$"),
    "timeline": Drawing(_TIMELINE, "step_timeline", "us", "^(busy|idle): ", log=True, kind="png"),
}


def rows_of(drawing: Drawing, figures: Sequence[Figure]) -> dict[str, Row]:
    """The figures to draw, by name; those of several rivals become one row."""
    rows: dict[str, Row] = {}
    for figure in figures:
        if figure.unit != drawing.unit or not re.search(drawing.pick, figure.name):
            continue
        row = rows.setdefault(figure.name, Row(value=figure.value, unit=figure.unit))
        if figure.rival is not None:
            refused = figure.rival_value is None
            row.rivals[figure.rival] = figure.rival[:100] if refused else figure.rival_value or 0.0
        row.bar = row.bar if figure.bar is None else figure.bar
        row.floor = row.floor if figure.floor is None else figure.floor
    return rows


def draw(drawing: Drawing, figures: Sequence[Figure], path: Path) -> None:
    """Draws one result as a bar chart, a group of bars for each figure.

    Raises:
        ValueError: where none of its figures is to be drawn.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = rows_of(drawing, figures)
    if not rows:
        raise ValueError(f"result {drawing.result!r}: expected figures to draw, found none of {drawing}")
    rivals = dict.fromkeys(rival for row in rows.values() for rival in row.rivals)
    colours = {rival: _COLOURS[index % len(_COLOURS)] for index, rival in enumerate(rivals)}
    settings = {"svg.hashsalt": "megagraph", "svg.fonttype": "none", "font.size": 9}
    with pyplot.style.context(["default", settings]):
        height = 1.4 + 0.24 * sum(2 + len(row.rivals) for row in rows.values())
        figure, axes = pyplot.subplots(figsize=(10, height), layout="constrained")
        _draw_rows(axes, rows, colours)
        axes.set_title(drawing.title)
        axes.set_xlabel(next(iter(rows.values())).unit)
        axes.set_xscale("log" if drawing.log else "linear")
        axes.margins(x=0.12, y=0.01)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[1] != [OURS]:
            figure.legend(loc="outside lower center", ncols=2, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        unsaid = {"svg": "Date", "png": "Software"}[drawing.kind]
        pyplot.savefig(path, format=drawing.kind, metadata={unsaid: None}, dpi=110)
        pyplot.close(figure)


def _draw_rows(axes: Any, rows: dict[str, Row], colours: dict[str, str]) -> None:
    """Draws groups of bars from the top down. Of zeroes a logarithmic axis shows the number alone."""
    groups = {name: [(OURS, row.value), *row.rivals.items()] for name, row in rows.items()}
    values = [of for bars in groups.values() for _, of in bars if not isinstance(of, str)]
    lowest = min((value for value in values if value > 0), default=1.0) / 2
    ticks, labels, top, named = [], [], 0.0, set[str]()

    def label(text: str) -> str:
        """A legend names each thing once."""
        fresh = text not in named
        named.add(text)
        return text if fresh else "_nolegend_"

    for name, bars in groups.items():
        for index, (who, value) in enumerate(bars):
            place = top - index
            style: dict[str, Any] = {"va": "center", "fontsize": 7, "bbox": _PAPER}
            if isinstance(value, str):
                axes.text(0.01, place, value, **style, transform=axes.get_yaxis_transform())
                continue
            axes.barh(place, value, 0.85, color=colours.get(who, _OURS_COLOUR), label=label(who))
            said = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
            axes.text(max(value, lowest), place, f" {said}", **style)
        bottom = top - len(bars) + 0.5
        for limit, text, line in ((rows[name].bar, "to reach", "--"), (rows[name].floor, "floor", "-")):
            if limit is not None and limit > 0:
                axes.plot([limit] * 2, [top + 0.5, bottom], line, color="black", label=label(text))
        ticks.append(top - (len(bars) - 1) / 2)
        labels.append("\n".join(textwrap.wrap(name, 60)))
        top -= len(bars) + 0.6
    axes.set_yticks(ticks, labels)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws the named results, by default all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot")
    names = ", ".join(DRAWINGS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {names}; default: all")
    images = Path("docs/images")
    parser.add_argument("--out", type=Path, default=images, help=f"folder, {images} by default")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in DRAWINGS:
            parser.error(f"expected one of {names}, got {name!r}")
    for name in options.names or DRAWINGS:
        drawing = DRAWINGS[name]
        source = Path(os.environ.get("OUT", RESULTS), f"{drawing.result}.json")
        target = options.out / f"{name}.{drawing.kind}"
        try:
            draw(drawing, read_result(source).figures, target)
        except FileNotFoundError:
            command = drawing.result.partition("_")[0]
            print(f"{source} is missing: `python -m benchmarks {command}` writes it", file=sys.stderr)
            return 2
        except ModuleNotFoundError as error:
            print(f"drawing needs matplotlib: pip install --group plot ({error})", file=sys.stderr)
            return 2
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"wrote {target}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
