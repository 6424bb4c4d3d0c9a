# SPDX-License-Identifier: Apache-2.0
"""Keeps the gradients of a site's parameters as they were, shows what a backward pass has made of them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.bits import Results, has_bits
from megagraph.bank.restore import main_grad_of
from megagraph.bank.sites import SiteSpec

__all__ = ["KeptGradients"]

_FLAG = "grad_added_to_main_grad"


class KeptGradients:
    """Of all trainable parameters of a site.

    Args:
        site: whose parameters.
    """

    def __init__(self, site: SiteSpec) -> None:
        self._params = {name: param for name, param in site.named_parameters() if param.requires_grad}
        main_grads = {name: main_grad_of(param) for name, param in self._params.items()}
        self._main = {name: grad for name, grad in main_grads.items() if grad is not None}
        # Most often they are zero between two steps, and need no copy.
        self._before = {name: grad.clone() if has_bits(grad) else None for name, grad in self._main.items()}
        self._flags = [
            (param, getattr(param, _FLAG)) for param in self._params.values() if hasattr(param, _FLAG)
        ]

    def found(self, swap: _C.AccumulatorSwap | None = None) -> Results:
        """What is there, by what it is in words; in no memory of its own.

        Args:
            swap: the accumulators of the backward pass; None for autograd's own.
        """
        results = {f"gradient of {name}": grad for name, grad in self._main.items()}
        others = {name: param for name, param in self._params.items() if name not in self._main}
        kept = [param.grad for param in others.values()] if swap is None else swap.take_kept_grads()
        named = zip(others, kept, strict=True)
        return results | {f"gradient of {name}": grad for name, grad in named if grad is not None}

    @contextlib.contextmanager
    def put_back_afterwards(self) -> Iterator[None]:
        """Leaves everything as it was, whatever happens inside, where no parameter has a `.grad` at first."""
        grads: list[tuple[nn.Parameter, Tensor | None]] = [(p, p.grad) for p in self._params.values()]
        for param, _ in grads:
            param.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for name, main_grad in self._main.items():
                    before = self._before[name]
                    _ = main_grad.zero_() if before is None else main_grad.copy_(before)
            for param, grad in grads:
                param.grad = grad
            for param, flag in self._flags:
                _set_flag(param, flag)


def _set_flag(param: nn.Parameter, flag: Any) -> None:
    setattr(param, _FLAG, flag)
