# SPDX-License-Identifier: Apache-2.0
"""Times callables: on the host while the launch queue has room, and on the GPU, its cache warm or cold."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Spread", "copy_us", "device_us", "host_us"]

_CACHE_BYTES = 256 << 20  # more than the second-level cache of any GPU today


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Repeated timings of one thing, in microseconds. The fastest says what is possible on a noisy host."""

    median: float
    fastest: float


def _spread(times: list[float]) -> Spread:
    return Spread(median=statistics.median(times), fastest=min(times))


def host_us(call: Callable[[], object], *, repeats: int = 50, warm_up: int = 5) -> Spread:
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


def device_us(
    call: Callable[[], object], *, repeats: int = 30, warm_up: int = 3, cold: bool = False
) -> Spread:
    """GPU time of what `call` enqueues, between two events on the current stream.

    Args:
        call: enqueues work; its host time must not exceed about 200 us.
        repeats: timed calls.
        warm_up: calls before them.
        cold: overwrite the second-level cache before each call.
    """
    cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for index in range(warm_up + repeats):
        cache.zero_() if cold else None
        # Keeps the device busy while the host enqueues, so that launches wait for nothing.
        torch.cuda._sleep(400_000)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if index >= warm_up:
            times.append(start.elapsed_time(end) * 1e3)
    return _spread(times)


def copy_us(num_bytes: int, *, cold: bool = False) -> Spread:
    """GPU time of a device-to-device copy that reads, and writes, `num_bytes`."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return device_us(lambda: target.copy_(source), cold=cold)
