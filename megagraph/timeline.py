# SPDX-License-Identifier: Apache-2.0
"""Draws when the slots of each model chunk were leased, from the report of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Lease", "draw_timeline"]

# Of each chunk: more are thinner than a line.
_MOST_LEASES = 64
_COLOURS = {True: "#1b6ca8", False: "#d98324"}


class Lease(NamedTuple):
    """A slot from the forward of a micro-batch until nobody held it any more.

    Args:
        slot: its index.
        grad: for training.
        begin, end: ms of a steady clock, the same for all processes of a machine; no end while it was held.
    """

    slot: int
    grad: bool
    begin: float
    end: float | None


def draw_timeline(leases: Mapping[str, Sequence[Lease]], path: Path) -> None:
    """Draws a line for each slot, and on it a bar for each micro-batch that was in it.

    Args:
        leases: of each model chunk, by its name in the report.
        path: of the image; its ending says which kind.

    Raises:
        ValueError: if matplotlib is not installed, or knows no such kind of image; if no chunk had several
            slots.
        OSError: if the image cannot be written.
    """
    shown = {name: list(some)[-_MOST_LEASES:] for name, some in leases.items() if some}
    if not shown:
        raise ValueError("no model chunk has had several slots, so that there is no timeline of them")
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"drawing needs matplotlib: pip install matplotlib ({error})") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    # What all chunks have recorded: one that runs more often has forgotten more.
    start = max(min(it.begin for it in some) for some in shown.values())
    lines: list[str] = []
    with pyplot.style.context(["default", {"svg.hashsalt": "megagraph", "font.size": 9}]):
        rows = sum(1 + max(it.slot for it in some) for some in shown.values())
        figure, axes = pyplot.subplots(figsize=(10, 1 + 0.25 * rows), layout="constrained")
        for name, some in shown.items():
            latest = max(it.end or it.begin for it in some)
            for slot in range(1 + max(it.slot for it in some)):
                own = [it for it in some if it.slot == slot and (it.end or latest) > start]
                for grad, colour in _COLOURS.items():
                    bars = [
                        (max(it.begin, start) - start, (it.end or latest) - max(it.begin, start))
                        for it in own
                        if it.grad is grad
                    ]
                    axes.broken_barh(bars, (len(lines) - 0.4, 0.8), color=colour, edgecolor="white")
                lines.append(f"{name}, slot {slot}")
        axes.set_yticks(range(len(lines)), lines)
        axes.invert_yaxis()
        axes.set_xlabel("ms on the host; blue: training, orange: forward only")
        figure.savefig(path)
        pyplot.close(figure)
