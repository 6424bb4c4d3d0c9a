# SPDX-License-Identifier: Apache-2.0
"""Times callables: on the host while the launch queue has room, and on the GPU, its cache warm or cold.

On the GPU between events, or kernel by kernel with torch's profiler: no launch gaps, no host.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

_CACHE_BYTES = 256 << 20  # more than the second-level cache of any GPU today
_FIRST_SLEEP, _LONGEST_SLEEP = 400_000, 1 << 27  # cycles; the latter takes less than a tenth of a second

MIB = 2**20
ACTIVITIES = (ProfilerActivity.CUDA, ProfilerActivity.CPU)
Call = Callable[[], object]


def host_seconds(call: Call) -> float:
    """Host time of `call`, which only enqueues; the device is idle before, so that no full launch queue
    holds the host up."""
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


def phases_us(
    sample: Callable[[], dict[str, float]], *, repeats: int, warm_up: int = 5, divisor: float = 1
) -> dict[str, list[float]]:
    """Repeats `sample`, which answers the seconds of each of its phases; the microseconds of each phase."""
    rounds = [sample() for _ in range(warm_up + repeats)][warm_up:]
    return {phase: [each[phase] * 1e6 / divisor for each in rounds] for phase in rounds[0]}


@functools.cache
def _other_data() -> Tensor:
    return torch.zeros(_CACHE_BYTES // 4, device="cuda")


def flush_cache() -> None:
    """Enqueues a read of more than the second-level cache holds: it leaves nothing there to be written."""
    torch.sum(_other_data())


def device_us(
    calls: Sequence[Call], *, repeats: int = 30, warm_up: int = 3, cold: bool = False
) -> list[list[float]]:
    """GPU time of what each of `calls` enqueues, between two events on the current stream; in turns.

    With `cold`, other data are read before each call, until the second-level cache holds nothing else; a
    warm call runs once more before. The events lie behind a sleep of the device that outlasts the host's
    work. Raises `RuntimeError` if a call waits for the device.
    """
    sleep = _FIRST_SLEEP

    def one(call: Call) -> float:
        nonlocal sleep
        while sleep <= _LONGEST_SLEEP:
            flush_cache() if cold else call()  # or its own data would be cold after another call
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

    rounds = [[one(call) for call in calls] for _ in range(warm_up + repeats)]
    return [list(times) for times in zip(*rounds[warm_up:], strict=True)]


def copy_of(num_bytes: int) -> Call:
    """What copies `num_bytes` from device memory to device memory: random ones, since equal ones may be
    compressed on their way."""
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def outside_bytes() -> int:
    """Device memory in use that torch's allocator does not hold, of every process."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


class Work(NamedTuple):
    """One kernel, copy or fill on the device, and its duration in microseconds."""

    name: str
    us: float


@functools.cache
def _start_profiler() -> None:
    """The first trace of a process may miss its first kernels."""
    with profile(activities=ACTIVITIES, acc_events=True):
        torch.zeros(1024, device="cuda").add_(1)
        torch.cuda.synchronize()


def device_work(call: Call, *, repeats: int, warm_up: int = 3, cold: bool = False) -> list[Work]:
    """Everything that ran on the device in `repeats` calls; with `cold`, flushes of its cache, too."""
    _start_profiler()
    for _ in range(warm_up):
        if cold:
            flush_cache()
        call()
    torch.cuda.synchronize()
    with profile(activities=ACTIVITIES, acc_events=True) as trace:
        for _ in range(repeats):
            if cold:
                flush_cache()
            call()
        torch.cuda.synchronize()
    return [
        Work(event.name, event.device_time_total)
        for event in trace.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def kernel_us(call: Call, *, repeats: int = 10) -> float:
    """Summed duration of all that one call runs on the device, its cache warm; the mean of `repeats`."""
    work = device_work(call, repeats=repeats)
    if not work:
        raise RuntimeError("the profiler saw nothing run on the device")
    return sum(item.us for item in work) / repeats


def times_of(work: list[Work], name: str) -> list[float]:
    """Durations of the work whose name contains `name`; raises `RuntimeError` if there is none."""
    times = [item.us for item in work if name in item.name]
    if not times:
        ran = sorted({item.name[:60] for item in work})
        raise RuntimeError(f"the profiler saw no {name!r}; it saw {ran}")
    return times
