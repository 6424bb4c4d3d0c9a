# SPDX-License-Identifier: Apache-2.0
"""Swaps the gradient accumulators of a site for ours while it is warmed up or captured.

What ours do is in csrc/bank/capture/main_grad_node.h, Note [Accumulator swap].
"""

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.restore import main_grad_of
from megagraph.bank.sites import SiteSpec

__all__ = ["swap_of", "swapped"]


def _already_added(param: Tensor) -> Callable[[], bool] | None:
    """Asks, at the gradient's turn, whether a layer with fused accumulation has added it itself."""
    if main_grad_of(param) is None or not hasattr(param, "grad_added_to_main_grad"):
        return None
    return lambda: bool(param.grad_added_to_main_grad) and not getattr(param, "zero_out_wgrad", False)


def swap_of(
    site: SiteSpec, training: bool, reached: dict[nn.Parameter, None] | None = None
) -> _C.AccumulatorSwap:
    """Accumulators of ours; `reached` takes the parameters in the order of their gradients."""
    params = site.trainable() if training else []

    def asked(param: nn.Parameter) -> Callable[[], bool] | None:
        check = _already_added(param)
        if reached is None:
            return check

        def note() -> bool:
            reached.setdefault(param)
            return check is not None and check()

        return note

    return _C.AccumulatorSwap([(param, main_grad_of(param), asked(param)) for param in params])


@contextlib.contextmanager
def swapped(swap: _C.AccumulatorSwap) -> Iterator[None]:
    """Puts ours in their place for a while."""
    swap.install()
    try:
        yield
        swap.join()
    finally:
        swap.restore()
