# SPDX-License-Identifier: Apache-2.0
"""Reads a profiler's trace of training steps: what ran on the GPU, and which of it graphs had launched."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

STEP = "benchmark: step"  # the profiler's range of a step
_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_CALLS = frozenset(("cuda_runtime", "cuda_driver"))


class Work(NamedTuple):
    """One kernel, copy or fill; times in microseconds."""

    start: float
    end: float
    is_graphed: bool


@dataclass(frozen=True)
class Timeline:
    """What one step launched, by its start on the device."""

    work: list[Work]

    def kernels_ms(self) -> float:
        """Summed duration of all work."""
        return sum(work.end - work.start for work in self.work) / 1e3

    def eager_ms(self) -> float:
        """Time in which something outside of graphs ran; work side by side counts once."""
        return _covered(work for work in self.work if not work.is_graphed)

    def busy_ms(self) -> float:
        """Time in which anything ran."""
        return _covered(self.work)


def _covered(work: Iterable[Work]) -> float:
    """Length of the union of intervals that are sorted by their start."""
    total, until = 0.0, float("-inf")
    for item in work:
        total += max(0.0, item.end - max(item.start, until))
        until = max(until, item.end)
    return total / 1e3


def read_timeline(trace: Mapping[str, Any]) -> Timeline:
    """The last step of a Chrome trace. Raises `ValueError` where it holds none."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [_span(event) for event in ranges if event["name"] == STEP]
    if not steps:
        raise ValueError(f"expected a trace with ranges {STEP!r}, found none")
    start, end = max(steps)
    calls = {_correlation(event): event for event in events if event.get("cat") in _CALLS}
    calls.pop(None, None)
    work = []
    for event in events:
        if event.get("cat") in _DEVICE:
            call = calls.get(_correlation(event), event)  # what launched it
            if start <= _span(call)[0] <= end:
                work.append(Work(*_span(event), "GraphLaunch" in call["name"]))
    return Timeline(sorted(work))


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])
