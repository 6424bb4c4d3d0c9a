# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel overlap in one process: experts on one rank, and a stand-in for the all-to-all.

One rank's all-to-all hands back its input, which the nodes of a plan free. The stand-in copies, and can take
time on the stream that it is called on, forward and backward, on one thread of the device: it shows what can
lie under compute, and nothing of a network.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_CYCLES = 1 << 24  # some ten milliseconds


@functools.cache
def _cycles_per_us() -> float:
    """Of the device's clock while it is busy."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CYCLES)
    start.record()
    torch.cuda._sleep(_CYCLES)
    end.record()
    end.synchronize()
    return _CYCLES / (float(start.elapsed_time(end)) * 1e3)


def keep_busy(us: float) -> None:
    """Occupies the current stream; does nothing where there is no GPU."""
    if us and torch.cuda.is_available():
        torch.cuda._sleep(int(us * _cycles_per_us()))


class _Exchange(torch.autograd.Function):
    """A copy that takes its time; so does that of the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, us: float) -> Tensor:
        ctx.us = us
        keep_busy(us)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        keep_busy(ctx.us)
        return grad.clone(), None


@contextlib.contextmanager
def copies_for_all_to_all(us: float = 0.0) -> Iterator[None]:
    """Inside, dispatchers copy. A copy of hidden states takes `us` more; probabilities travel beside them."""
    from megatron.core.transformer.moe import token_dispatcher

    def exchange(_group: Any, rows: Tensor, *_splits: Any, **_how: Any) -> Any:
        return _Exchange.apply(rows, us if rows.dim() > 1 else 0.0)  # type: ignore[no-untyped-call]

    with mock.patch.object(token_dispatcher, "all_to_all", exchange):
        yield
