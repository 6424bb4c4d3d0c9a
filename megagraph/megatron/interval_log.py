# SPDX-License-Identifier: Apache-2.0
"""A line of the log for each interval of training steps: what replayed, what did not, and what guards it."""

import weakref
from collections.abc import Iterable, Mapping

from megagraph.decide.reasons import EagerReason
from megagraph.log import log
from megagraph.megatron.graphs.model_graphs import ModelGraphs

__all__ = ["IntervalLog"]


class IntervalLog:
    """Counts training steps and reports each model's calls of the last interval.

    Args:
        interval: steps between two lines; 0 for none.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        # Of each model: its training steps, and its counters at the last line.
        self._seen: weakref.WeakKeyDictionary[ModelGraphs, tuple[int, Mapping[str, int]]]
        self._seen = weakref.WeakKeyDictionary()

    def after_training_step(self, models: Iterable[ModelGraphs]) -> None:
        """Counts a step of each model, and writes the lines that are due."""
        if self._interval == 0:
            return
        for graphs in models:
            steps, before = self._seen.get(graphs, (0, {}))
            steps += 1
            if steps % self._interval == 0:
                now = graphs.counters()
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
