# SPDX-License-Identifier: Apache-2.0
"""Draws results: `python -m benchmarks.plot` writes a step, gains, and nodes of two layers to docs/images.

Needs matplotlib (`pip install --group plot`) and no GPU. The same results give the same bytes.
"""

import contextlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_delayed_weights import TIMELINE
from benchmarks.bench_gain import CASES, GAIN, HIDDEN, TOKENS
from benchmarks.measuring.results import FOLDER, Figure, read_figures

IMAGES = Path("docs/images")
OURS = "megagraph"
_COLOURS = ("#1b6ca8", "#d98324", "#8a8d91", "#6a994e", "#9d4edd", "#c1121f")
_EXCHANGES = ("moe_dispatch", "moe_combine")  # the nodes on the communication stream


def rows_of(figures: Sequence[Figure]) -> dict[str, dict[str, float]]:
    """The medians of steps in ms, by name: ours, and that of each rival that ran."""
    rows: dict[str, dict[str, float]] = {}
    for figure in figures:
        if figure.unit == "ms" and figure.name.endswith("step, median"):
            row = rows.setdefault(figure.name, {OURS: figure.value})
            if figure.rival is not None and figure.rival_value is not None:
                row[figure.rival] = figure.rival_value
    return rows


def nodes_of(figures: Sequence[Figure]) -> dict[str, dict[str, float]]:
    """When each node begins and ends, in ms."""
    nodes: dict[str, dict[str, float]] = {}
    for figure in figures:
        node, _, what = figure.name.removeprefix(f"{TIMELINE}, ").partition(": ")
        if figure.name.startswith(TIMELINE):
            nodes.setdefault(node, {})[what] = figure.value
    return nodes


def gains_of(figures: Sequence[Figure]) -> list[list[float]]:
    """How many times as fast graphed steps are, by hidden size and by tokens of a pack."""
    values = {figure.name: figure.value for figure in figures}
    gains = [values[f"{case.name}: {GAIN}"] for case in CASES]
    return [gains[start : start + len(TOKENS)] for start in range(0, len(gains), len(TOKENS))]


@contextlib.contextmanager
def _drawn(path: Path, bars: int) -> Iterator[tuple[Any, Any]]:
    """A figure with room for some bars, and its axes; saves it in the end."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with pyplot.style.context(["default", {"svg.hashsalt": OURS, "svg.fonttype": "none", "font.size": 9}]):
        figure, axes = pyplot.subplots(figsize=(10, 1 + 0.3 * bars), layout="constrained")
        yield figure, axes
        pyplot.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def draw(rows: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draws a group of bars for each step."""
    everyone = list(dict.fromkeys(who for row in rows.values() for who in row))
    with _drawn(path, sum(map(len, rows.values()))) as (figure, axes):
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


def draw_nodes(nodes: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draws a bar for each node, coloured by its stream, in the order in which they begin."""
    names = sorted(nodes, key=lambda name: -nodes[name]["begins"])
    with _drawn(path, len(nodes)) as (figure, axes):
        for stream, colour in zip(("compute", "communication"), _COLOURS, strict=False):
            own = [name for name in names if name.startswith(_EXCHANGES) == (stream == "communication")]
            begins = [nodes[name]["begins"] for name in own]
            takes = [nodes[name]["ends"] - begin for name, begin in zip(own, begins, strict=True)]
            axes.barh([*map(names.index, own)], takes, 0.85, begins, color=colour, label=f"{stream} stream")
        axes.set_yticks(range(len(names)), names)
        axes.set(title=TIMELINE, xlabel="ms")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)


def draw_gains(gains: Sequence[Sequence[float]], path: Path) -> None:
    """Draws a field for each hidden size and length of packs, darker the more graphs gain there."""
    with _drawn(path, 2 * len(gains)) as (_figure, axes):
        axes.imshow(gains, cmap="Blues", vmin=1, aspect="auto")
        middle = (1 + max(map(max, gains))) / 2
        for place, row in enumerate(gains):
            for column, gain in enumerate(row):
                colour = "white" if gain > middle else "black"
                axes.text(column, place, f"{gain:.2f}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(TOKENS)), [f"{tokens:,}" for tokens in TOKENS])
        axes.set_yticks(range(len(HIDDEN)), HIDDEN)
        axes.set(title="An eager step / a graphed one", xlabel="tokens of a pack", ylabel="hidden size")


if __name__ == "__main__":
    draw(rows_of(read_figures(FOLDER / "step.json")), IMAGES / "step.svg")
    draw_nodes(nodes_of(read_figures(FOLDER / "delayed_weights.json")), IMAGES / "nodes.svg")
    draw_gains(gains_of(read_figures(FOLDER / "gain.json")), IMAGES / "gain.svg")
    print(f"wrote {IMAGES}", flush=True)
