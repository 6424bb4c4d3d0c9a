# SPDX-License-Identifier: Apache-2.0
"""One line of the log for each interval of training steps: what was replayed, and why the rest was not."""

import logging
import os
from collections import Counter
from collections.abc import Iterable

from megagraph.dispatch import EagerReason
from megagraph.megatron.model_graphs import ModelGraphs

__all__ = ["IntervalLog"]

_log = logging.getLogger("megagraph")


class IntervalLog:
    """Counts training steps and reports each model's calls of the last interval, on rank 0.

    Args:
        interval: steps between two lines; 0 for none.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._steps = 0
        self._before: Counter[tuple[int, str]] = Counter()  # by the id of the graphs and the counter's name

    def after_training_step(self, models: Iterable[ModelGraphs]) -> None:
        """Counts a step, and writes the lines that are due."""
        self._steps += 1
        if self._interval == 0 or self._steps % self._interval or int(os.environ.get("RANK", "0")) != 0:
            return
        for graphs in models:
            _log.info("steps %d-%d: %s", self._steps - self._interval + 1, self._steps, self._line(graphs))

    def _line(self, graphs: ModelGraphs) -> str:
        now = Counter({(id(graphs), name): count for name, count in graphs.block.counters().items()})
        since = {name: count - self._before[key, name] for (key, name), count in now.items()}
        self._before.update(now - self._before)
        eager = {reason.name: since[reason.name] for reason in EagerReason if since[reason.name]}
        reasons = ", ".join(f"{name} {count}" for name, count in eager.items())
        return (
            f"{graphs.name}: {since['replays']} of {since['calls']} layer calls replayed, "
            f"{sum(eager.values())} eager{f' ({reasons})' if reasons else ''}"
        )
