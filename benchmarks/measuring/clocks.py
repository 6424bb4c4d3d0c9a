# SPDX-License-Identifier: Apache-2.0
"""Times callables: on the host while the launch queue has room, and on the GPU, its cache warm or cold.

On the GPU between events, or kernel by kernel with torch's profiler: no launch gaps, no host.
"""

import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

_CACHE_BYTES = 256 << 20  # more than the second-level cache of any GPU today
_FIRST_SLEEP, _LONGEST_SLEEP = 400_000, 1 << 27  # cycles; the latter takes less than a tenth of a second

_WARM_UP = 5  # samples that are not counted

MIB = 2**20
ACTIVITIES = (ProfilerActivity.CUDA, ProfilerActivity.CPU)
Call = Callable[[], object]
Phases = dict[str, float]  # seconds of each
Item = TypeVar("Item")


def host_seconds(call: Call) -> float:
    """Host time of `call`, which only enqueues; the device is idle before, so that no full queue holds it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def wall_ms(call: Call) -> float:
    """Time until `call` has returned and the device, idle before, has done it all."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def phases_us(sample: Callable[[], Phases], *, repeats: int, divisor: float = 1) -> dict[str, list[float]]:
    """Repeats `sample`, which answers the seconds of each of its phases; the microseconds of each phase."""
    rounds = [sample() for _ in range(_WARM_UP + repeats)][_WARM_UP:]
    return {phase: [each[phase] * 1e6 / divisor for each in rounds] for phase in rounds[0]}


@functools.cache
def _other_data() -> Tensor:
    return torch.zeros(_CACHE_BYTES // 4, device="cuda")


def device_us(calls: Sequence[Call], *, repeats: int = 30, cold: bool = False) -> list[list[float]]:
    """GPU time of what each of `calls` enqueues, between two events on the current stream; in turns.

    With `cold`, other data are read before each call, until the second-level cache holds nothing else; a
    warm call runs once more before. The events lie behind a sleep of the device that outlasts the host's
    work. Raises `RuntimeError` if a call waits for the device.
    """
    sleep = _FIRST_SLEEP

    def one(call: Call) -> float:
        nonlocal sleep
        while sleep <= _LONGEST_SLEEP:
            # Reads leave nothing there to be written; its own data would be cold after another call.
            torch.sum(_other_data()) if cold else call()
            # Keeps the device busy while the host enqueues, so that launches wait for nothing.
            torch.cuda._sleep(sleep)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            in_time = not start.query()
            end.synchronize()
            if in_time:
                return float(start.elapsed_time(end)) * 1e3
            sleep *= 2
        raise RuntimeError("the host took longer than the device can be kept waiting: does the call wait?")

    rounds = [[one(call) for call in calls] for _ in range(_WARM_UP + repeats)][_WARM_UP:]
    return [list(times) for times in zip(*rounds, strict=True)]


def copy_of(num_bytes: int) -> Call:
    """What copies `num_bytes` on the device: random ones, since equal ones may be compressed on their way."""
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


STEP = "benchmark: step"  # the profiler's range of a step
PART = "benchmark: part "  # begins the name of a range of a part of it; parts are not nested
_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_CALLS = frozenset(("cuda_runtime", "cuda_driver"))


class Span(NamedTuple):
    """One kernel, copy or fill; times in microseconds."""

    start: float
    end: float
    is_graphed: bool
    name: str
    part: str = ""  # in which it was launched


@dataclass(frozen=True)
class Timeline:
    """What one step launched, by its start on the device."""

    work: list[Span]
    launches: int  # calls that launched it: one for all that is in a graph

    def kernels_ms(self) -> float:
        """Summed duration of all work."""
        return sum(work.end - work.start for work in self.work) / 1e3

    def eager_ms(self) -> float:
        """Time in which something outside of graphs ran; work side by side counts once."""
        return _covered(work for work in self.work if not work.is_graphed)

    def busy_ms(self) -> float:
        return _covered(self.work)

    def share_beside(self, name: str) -> float:
        """Of the time in which kernels of this name ran, the share in which something else did."""
        own = _covered(work for work in self.work if name in work.name)
        others = _covered(work for work in self.work if name not in work.name)
        return (own + others - self.busy_ms()) / own


def _covered(work: Iterable[Span]) -> float:
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
    parts = sorted(
        (*_span(it), it["name"].removeprefix(PART)) for it in ranges if it["name"].startswith(PART)
    )
    calls = {_correlation(event): event for event in events if event.get("cat") in _CALLS}
    calls.pop(None, None)
    work, launches = [], set[Any]()
    for event in events:
        if event.get("cat") in _DEVICE:
            call = calls.get(_correlation(event), event)  # what launched it
            if start <= (at := _span(call)[0]) <= end:
                part = next((name for begin, over, name in parts if begin <= at <= over), "")
                work.append(Span(*_span(event), "GraphLaunch" in call["name"], event["name"], part))
                launches.add(_correlation(event))
    return Timeline(sorted(work), len(launches))


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def traced(call: Call) -> Timeline:
    """The second of two profiled calls, each with a range `STEP` in it; the first pays for the profiler."""
    with profile(activities=ACTIVITIES) as trace:
        for _ in range(2):
            call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        return read_timeline(json.loads(path.read_text(encoding="utf-8")))


def kernel_us(call: Call, *, repeats: int = 10) -> float:
    """Summed duration of all that one call runs on the device, its cache warm; the mean of `repeats`."""

    def calls() -> None:
        with record_function(STEP):
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()

    return traced(calls).kernels_ms() * 1e3 / repeats


def in_turns(items: Sequence[Item], rounds: int) -> Iterator[tuple[int, Item]]:
    """Each of the items in each round, with its number; another one is first in the next round."""
    for index in range(rounds):
        for offset in range(len(items)):
            yield index, items[(index + offset) % len(items)]
