# SPDX-License-Identifier: Apache-2.0
"""Times callables: on the host while the launch queue has room, and on the GPU, its cache warm or cold."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CACHE_BYTES = 256 << 20  # more than the second-level cache of any GPU today
_FIRST_SLEEP, _LONGEST_SLEEP = 400_000, 1 << 27  # cycles; the latter takes less than a tenth of a second

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Repeated timings of one thing, in microseconds. The fastest says what is possible on a noisy host."""

    median: float
    fastest: float


def _spread(times: list[float]) -> Spread:
    return Spread(median=statistics.median(times), fastest=min(times))


def host_us(call: Call, *, repeats: int = 50, warm_up: int = 5) -> Spread:
    """Host time of `call`, which only enqueues. The device is idle before each call, so that no full
    launch queue holds the host up."""
    times = []
    for index in range(warm_up + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        if index >= warm_up:
            times.append(elapsed * 1e6)
    torch.cuda.synchronize()
    return _spread(times)


@functools.cache
def _other_data() -> Tensor:
    return torch.zeros(_CACHE_BYTES // 4, device="cuda")


def flush_cache() -> None:
    """Enqueues a read of more than the second-level cache holds: it leaves nothing there to be written."""
    torch.sum(_other_data())


class _DeviceClock:
    """Times calls between two events, behind a sleep of the device that outlasts the host's work."""

    def __init__(self) -> None:
        self._sleep = _FIRST_SLEEP

    def us(self, call: Call, *, cold: bool) -> float:
        """One timing. Raises `RuntimeError` where the host is never done in time."""
        while self._sleep <= _LONGEST_SLEEP:
            flush_cache() if cold else call()  # or its own data would be cold after another call
            # Keeps the device busy while the host enqueues, so that launches wait for nothing.
            torch.cuda._sleep(self._sleep)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            in_time = not start.query()
            end.synchronize()
            if in_time:
                return float(start.elapsed_time(end)) * 1e3
            self._sleep *= 2
        raise RuntimeError("the host took longer than the device can be kept waiting: does the call wait?")


def device_us_in_turns(
    calls: Sequence[Call], *, repeats: int = 30, warm_up: int = 3, cold: bool = False
) -> list[Spread]:
    """GPU time of what each of `calls` enqueues, between two events on the current stream; in turns.

    Args:
        calls: each enqueues work.
        repeats: timings of each.
        warm_up: rounds before them.
        cold: read other data before each call, until the second-level cache holds nothing else. A warm
            call runs once more before.

    Raises:
        RuntimeError: if a call waits for the device.
    """
    clock = _DeviceClock()
    rounds = [[clock.us(call, cold=cold) for call in calls] for _ in range(warm_up + repeats)]
    return [_spread(list(times)) for times in zip(*rounds[warm_up:], strict=True)]


def device_us(call: Call, *, repeats: int = 30, warm_up: int = 3, cold: bool = False) -> Spread:
    """As `device_us_in_turns()`, of one call."""
    (times,) = device_us_in_turns([call], repeats=repeats, warm_up=warm_up, cold=cold)
    return times


def copy_of(num_bytes: int) -> Call:
    """What copies `num_bytes` from device memory to device memory: random ones, since equal ones may be
    compressed on their way."""
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
