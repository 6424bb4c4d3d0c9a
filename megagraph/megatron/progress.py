# SPDX-License-Identifier: Apache-2.0
"""The progress bar of a capture."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from megagraph.bank.bank import Progress
from megagraph.log import rank

__all__ = ["capture_progress"]


def capture_progress() -> Progress:
    """A display for `Bank.capture()`, on standard error; only of rank 0, and only on a terminal."""
    console = Console(stderr=True)
    state: dict[str, tuple[Bar, TaskID]] = {}

    def show(done: int, total: int, label: str) -> None:
        if done == 0 and "bar" not in state:
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
            state["bar"] = bar, bar.add_task(label, total=total)
        bar, task = state["bar"]
        bar.update(task, completed=done, total=total, description=label)
        if done == total:
            bar.stop()
            del state["bar"]

    return show
