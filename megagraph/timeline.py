# SPDX-License-Identifier: Apache-2.0
"""How long training steps take, and when the slots of each model chunk were leased, which it draws."""

import contextlib
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Lease", "StepClock", "draw_timeline", "quartiles"]

_MOST_STEPS = 1000  # of each kind: the last ones

# Of each chunk: more are thinner than a line.
_MOST_LEASES = 32
_COLOURS = {True: "#1b6ca8", False: "#d98324"}


class Lease(NamedTuple):
    """A slot from the forward of a micro-batch until nobody held it any more."""

    slot: int
    grad: bool  # for training
    begin: float  # ms since 1970, as the end
    end: float | None  # None while it was held


class StepClock:
    """Measures training steps of each kind, such as eager and graphed ones, and waits for no device.

    On the host, which is what graphs shorten, and from the begin of one to that of the next of its kind.
    """

    def __init__(self) -> None:
        some: Any = partial(deque[float], maxlen=_MOST_STEPS)
        self._host: dict[str, deque[float]] = defaultdict(some)
        self._between: dict[str, deque[float]] = defaultdict(some)
        self._last: tuple[str, float] | None = None  # if it was one, and nothing has run since

    @contextlib.contextmanager
    def step(self, kind: str | None) -> Iterator[None]:
        """Around a step; None if it is not to be measured."""
        begin, last = time.perf_counter(), self._last
        self._last = None
        if kind is None:
            yield
            return
        if last is not None and last[0] == kind:
            self._between[kind].append(begin - last[1])
        yield
        self._host[kind].append(time.perf_counter() - begin)
        self._last = kind, begin

    def report(self) -> dict[str, Any]:
        """Of each kind the number of steps, and quartiles in ms; null without two of them."""
        return {
            kind: {
                "steps": len(host),
                "host_ms": quartiles(host),
                "step_ms": quartiles(self._between[kind]),
            }
            for kind, host in self._host.items()
        }


def quartiles(seconds: Sequence[float]) -> list[float] | None:
    """In ms; None without two of them."""
    if len(seconds) < 2:
        return None
    return [1e3 * it for it in statistics.quantiles(seconds, n=4, method="inclusive")]


def draw_timeline(leases: Mapping[str, Sequence[Lease]], path: Path) -> None:
    """Draws a line for each slot of each chunk, and on it a bar for each micro-batch that was in it.

    Raises:
        ValueError: if matplotlib is not installed; naming the path and the kinds of images, if its ending is
            none of them; if no chunk had several slots.
        OSError: if the image cannot be written.
    """
    shown = {name: list(some)[-_MOST_LEASES:] for name, some in leases.items() if some}
    if not shown:
        raise ValueError("no model chunk has had several slots, so that there is no timeline of them")
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"drawing needs matplotlib: pip install matplotlib ({error})") from error

    # What all chunks have recorded: one that runs more often has forgotten more.
    start = max(min(it.begin for it in some) for some in shown.values())
    # Until when one that has no end is drawn.
    latest = max(it.begin if it.end is None else it.end for some in shown.values() for it in some)
    slots = {name: sorted({it.slot for it in leases[name]}) for name in shown}
    lines: list[str] = []
    # A name is no formula.
    with style.context(["default", {"text.parse_math": False, "font.size": 9}]):
        # Not pyplot's: that keeps figures, and chooses a backend for the whole process.
        figure = Figure(figsize=(10, 1 + 0.25 * sum(map(len, slots.values()))), layout="constrained")
        kinds = sorted(figure.canvas.get_supported_filetypes())
        if path.suffix[1:].lower() not in kinds:
            raise ValueError(f"{path}: expected an image, whose name ends in one of {', '.join(kinds)}")
        axes = figure.subplots()
        for name, some in shown.items():
            for slot in slots[name]:
                for grad, colour in _COLOURS.items():
                    own = [it for it in some if it.slot == slot and it.grad is grad]
                    ends = [(max(it.begin, start), latest if it.end is None else it.end) for it in own]
                    bars = [(begin - start, end - begin) for begin, end in ends if end > begin]
                    axes.broken_barh(bars, (len(lines) - 0.4, 0.8), color=colour, edgecolor="white")
                lines.append(f"{name}, slot {slot}")
        axes.set_yticks(range(len(lines)), lines)
        axes.invert_yaxis()
        axes.set_xlabel("ms on the host; blue: training, orange: forward only")
        figure.savefig(path)
