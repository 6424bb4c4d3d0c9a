# SPDX-License-Identifier: Apache-2.0
"""Reduces a profiler's trace of training steps to a table: when the GPU works, and whom it waits for."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_CALLS = frozenset(("cuda_runtime", "cuda_driver"))
_WAIT = "Synchronize"
_PHASE = "phase: "
_STEP = "schedule"
_SHORT_US = 2.0
# Phases of which replayed layers are the middle: how the parts before, in and after them are called.
_AROUND_GRAPHS = {
    "layers": ("staging", "layers, forward", "final norm"),
    "backward": ("backward of loss, head and norm", "layers, backward", "backward of embedding"),
}
_NAMES = {_STEP: "between micro-batches", "forward step": "model, between its parts"}


class Work(NamedTuple):
    """One kernel, copy or fill; times in microseconds."""

    start: float  # on the device
    end: float
    launched: float  # when the call that launched it began, on the host
    returned: float  # when that call returned
    graph: int | None  # the call's number where it launched a graph
    name: str  # of the kernel


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step."""

    start: float  # of the schedule on the host, in microseconds
    end: float  # of the schedule, the device being done
    work: Sequence[Work]  # what the step launched, by its start on the device
    phases: Sequence[tuple[float, float, str]]  # of the host: start, end and name, outer ones first
    waits: Sequence[tuple[float, float]] = ()  # of the host for the device: start and end of each call

    def host_us(self) -> float:
        """Time that the host was at work, not waiting for the device; a profiler makes it longer."""
        return self.end - self.start - sum(end - start for start, end in self.waits)

    def graphed_share(self) -> float:
        """How much of all kernels, copies and fills graphs launch, by number."""
        return sum(work.graph is not None for work in self.work) / max(1, len(self.work))

    def kernels_us(self) -> float:
        """Summed duration of all work."""
        return sum(work.end - work.start for work in self.work)

    def eager_span_us(self) -> float:
        """Time in which something outside of graphs ran; work side by side counts once."""
        return _covered(work for work in self.work if work.graph is None)

    def busy_us(self) -> float:
        """Time in which anything ran."""
        return _covered(self.work)

    def idle_us(self) -> dict[str, float]:
        """Time in which nothing ran, by what the device waited for; the most first.

        A gap is the host's where the work after it was launched once the device was idle, and has the name
        of the phase that launched it; else that work was queued already.
        """
        idle: dict[str, float] = defaultdict(float)
        if not self.work:
            return idle
        idle["before the first kernel"] = max(0.0, self.work[0].start - self.start)
        before = self.work[0]  # what ends last
        for work in self.work[1:]:
            if (gap := work.start - before.end) > 0:
                idle[self._waits_for(before, work, gap)] += gap
            before = max(before, work, key=lambda each: each.end)
        idle["after the last kernel"] = max(0.0, self.end - before.end)
        return dict(sorted(idle.items(), key=lambda item: -item[1]))

    def _waits_for(self, before: Work, work: Work, gap: float) -> str:
        if gap <= _SHORT_US:
            return f"gaps of up to {_SHORT_US:.0f} us"
        if work.graph is not None and work.graph == before.graph:
            return "between nodes of a graph"
        who = "queued already" if work.returned <= before.end else "host"
        return f"{who}: {self._phase_of(work)}"

    def _phase_of(self, work: Work) -> str:
        inner = [phase for phase in self.phases if phase[0] <= work.launched <= phase[1]]
        if not inner:
            return "outside of the schedule"
        start, end, name = inner[-1]
        if name not in _AROUND_GRAPHS:
            return _NAMES.get(name, name)
        before, within, after = _AROUND_GRAPHS[name]
        launches = [at for at in self._graph_launches if start <= at <= end]
        if work.graph is not None:
            return within
        if not launches:  # ran eager
            return name
        return before if work.launched < launches[0] else after if work.launched > launches[-1] else within

    @functools.cached_property
    def _graph_launches(self) -> list[float]:
        return sorted({work.launched for work in self.work if work.graph is not None})

    def rows_us(self) -> dict[str, float]:
        """The table: the wall, what the device was busy with, and what it waited for."""
        return {
            "wall of the profiled step": self.end - self.start,
            "busy: graphs": self.busy_us() - self.eager_span_us(),
            "busy: eager parts": self.eager_span_us(),
            **{f"idle: {name}": value for name, value in self.idle_us().items()},
        }


def _covered(work: Iterable[Work]) -> float:
    """Length of the union of intervals that are sorted by their start."""
    total, until = 0.0, float("-inf")
    for item in work:
        total += max(0.0, item.end - max(item.start, until))
        until = max(until, item.end)
    return total


def read_timeline(trace: Mapping[str, Any]) -> Timeline:
    """The last step of a Chrome trace of `named_phases()`. Raises `ValueError` where it holds no step."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    named = [each for each in events if each.get("cat") == "user_annotation" and _PHASE in each["name"]]
    phases = sorted(
        ((*_span(event), event["name"].removeprefix(_PHASE)) for event in named),
        key=lambda phase: (phase[0], -phase[1]),
    )
    steps = [phase for phase in phases if phase[2] == _STEP]
    if not steps:
        raise ValueError(f"expected a trace with ranges {_PHASE + _STEP!r}, found none")
    start, end, _ = steps[-1]
    calls = {_correlation(event): event for event in events if event.get("cat") in _CALLS}
    work = [_work_of(event, calls) for event in events if event.get("cat") in _DEVICE]
    launched = sorted((each for each in work if start <= each.launched <= end), key=lambda each: each[:2])
    within = [phase for phase in phases if start <= phase[0] <= end]
    spans = (_span(call) for call in calls.values() if _WAIT in call["name"])
    waits = sorted(span for span in spans if start <= span[0] <= end)
    return Timeline(start=start, end=end, work=launched, phases=within, waits=waits)


def _correlation(event: Mapping[str, Any]) -> int | None:
    number: int | None = event.get("args", {}).get("correlation")
    return number


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _work_of(event: Mapping[str, Any], calls: Mapping[int | None, Mapping[str, Any]]) -> Work:
    number = _correlation(event)
    call = None if number is None else calls.get(number)
    graph = number if call is not None and "GraphLaunch" in call["name"] else None
    return Work(*_span(event), *_span(event if call is None else call), graph, event["name"])
