# SPDX-License-Identifier: Apache-2.0
"""Times the kernels and copies of a callable one by one, with torch's profiler: no launch gaps, no host."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring.clocks import flush_cache

ACTIVITIES = (ProfilerActivity.CUDA, ProfilerActivity.CPU)


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


def device_work(
    call: Callable[[], object], *, repeats: int, warm_up: int = 3, cold: bool = False
) -> list[Work]:
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


def kernel_us(call: Callable[[], object], *, repeats: int = 10) -> float:
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
