# SPDX-License-Identifier: Apache-2.0
"""Linear layers that delay the product for their weight, with the face of Transformer Engine's."""

import queue
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

# Of gradients that a fused layer hands on in place of those that it has added; whoever adds one shows.
FILLER = 7.0
_now = {"is_capturing": False}


def capturing() -> AbstractContextManager[Any]:
    """While inside, hooks of `accumulates()` do nothing, as Megatron's DDP's in a capture."""
    return mock.patch.dict(_now, is_capturing=True)


def accumulates(param: Any) -> Callable[..., None]:
    """What Megatron's DDP hangs on a module for a parameter whose gradient comes late."""

    def hook(*_: object) -> None:
        if _now["is_capturing"]:
            return
        if param.grad is not None and not param.grad_added_to_main_grad:
            param.main_grad.add_(param.grad)
        param.grad = None

    return hook


class Store:
    """What products are to be made of, the oldest first; a copy of a layer gets another one."""

    def __init__(self, *, delays: bool = True) -> None:
        self.context: queue.Queue[Any] = queue.Queue()
        self.delays = delays

    def delay_wgrad_compute(self) -> bool:
        return self.delays

    def __deepcopy__(self, memo: object) -> "Store":
        return Store(delays=self.delays)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.layer = layer
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        layer = ctx.layer
        layer.wgrad_store.context.put((hidden.detach(), grad))
        if not layer.wgrad_store.delays:
            layer.product()
        wgrad = None
        if layer.is_fused:
            layer.weight.grad_added_to_main_grad = True
            wgrad = torch.full_like(weight, FILLER)  # stands for it
        elif not layer.wgrad_store.delays:
            wgrad, layer.made = layer.made, None
        return grad @ weight, wgrad, None


class Delays:
    """What a linear layer with a `weight` needs for that. `is_fused`: its products add to `main_grad`."""

    weight: Any
    is_fused = False
    made: Tensor | None = None

    def init_delay(self, *, is_fused: bool, delays: bool) -> None:
        self.is_fused, self.wgrad_store = is_fused, Store(delays=delays)
        self.made = None  # or the first product would change the layer's state
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        self.weight.skip_backward_post_hook = delays

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def apply_weight(self, hidden: Tensor) -> Tensor:
        return _Product.apply(hidden, self.weight, self)

    @torch.no_grad()
    def product(self) -> None:
        """Makes the oldest gradient that is missing."""
        hidden, grad = self.wgrad_store.context.get_nowait()
        made = grad.flatten(0, -2).t() @ hidden.flatten(0, -2)
        if self.is_fused:
            self.weight.main_grad.add_(made)
        else:
            self.made = made

    def backward_dw(self) -> None:
        if not self.wgrad_store.delays:
            return
        self.product()
        if not self.is_fused:
            self.weight.grad, self.made = self.made, None
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


class DelayedLinear(Delays, nn.Linear):
    """Without a bias."""

    def __init__(self, *widths: int, is_fused: bool = False, delays: bool = True) -> None:
        super().__init__(*widths, bias=False)
        self.init_delay(is_fused=is_fused, delays=delays)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.apply_weight(hidden)
