# SPDX-License-Identifier: Apache-2.0
"""What a run says as it goes: a progress bar while capturing, and a line of the log now and then."""

import weakref
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from megagraph.bank.bank import Progress
from megagraph.decide.reasons import EagerReason
from megagraph.log import log, rank
from megagraph.megatron.graphs.model import GraphedModel

__all__ = ["IntervalLog", "capture_progress"]


def capture_progress() -> Progress:
    """A display for `Bank.capture()`, on standard error; only of rank 0, and only on a terminal."""
    console = Console(stderr=True)
    running: list[tuple[Bar, TaskID]] = []

    def show(done: int, total: int, label: str) -> None:
        if done == 0 and not running:
            bar = Bar(
                TextColumn("capturing graphs"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=console,
                transient=True,
                disable=not console.is_terminal or rank() != 0,
            )
            bar.start()
            running.append((bar, bar.add_task(label, total=total)))
        bar, task = running[0]
        bar.update(task, completed=done, total=total, description=label)
        if done == total:
            bar.stop()
            running.clear()

    return show


class IntervalLog:
    """Counts training steps, and says of each model what was replayed in an interval and what guards it.

    Args:
        interval: steps between two lines; 0 for none.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        # Of each model: its training steps, and its counters at the last line.
        self._seen: weakref.WeakKeyDictionary[GraphedModel, tuple[int, Mapping[str, int]]]
        self._seen = weakref.WeakKeyDictionary()

    def after_training_step(self, models: Iterable[GraphedModel]) -> None:
        """Counts a step of each model, and writes the lines that are due."""
        for graphs in models if self._interval else ():
            steps, before = self._seen.get(graphs, (0, {}))
            steps += 1
            if steps % self._interval == 0:
                now = graphs.captures.bank.counters()
                since = {name: count - before.get(name, 0) for name, count in now.items()}
                what = f"{graphs.name}: {_line(since)}; {graphs.guards()}"
                log.info("steps %d-%d: %s", steps - self._interval + 1, steps, what)
                before = now
            self._seen[graphs] = steps, before


def _line(since: Mapping[str, int]) -> str:
    eager = {reason.name: since[reason.name] for reason in EagerReason if since[reason.name]}
    reasons = ", ".join(f"{name} {count}" for name, count in eager.items())
    return (
        f"{since['replays']} of {since['calls']} layer calls replayed, "
        f"{sum(eager.values())} eager{f' ({reasons})' if reasons else ''}"
    )
