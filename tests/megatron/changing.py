# SPDX-License-Identifier: Apache-2.0
"""Ways of changing what a captured layer's Python reads, and of taking a change back."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from state_rig import WIDTH, Probe
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from megagraph.decide.reasons import EagerReason
from megagraph.demo.trainer import Trainer

Undo = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a trainer's second layer.

    Args:
        do: makes it; returns what takes it back.
        reason: why the layers run eager in the step after it; None where they replay.
        layers: how many of the two do.
        is_eager_back: taking it back costs an eager step, too. Memory that moves a second time costs none.
        in_step: also noticed inside a step.
        stays_eager: the changed layer is not captured while it lasts.
        lasts: it cannot be taken back.
        matters: eager's own losses are others afterwards.
    """

    do: Callable[[Trainer], Undo]
    reason: EagerReason | None = EagerReason.STATE_CHANGED
    layers: int = 2
    is_eager_back: bool = False
    in_step: bool = True
    stays_eager: bool = False
    lasts: bool = False
    matters: bool = True


def second_layer(trainer: Trainer) -> Any:
    """The layer that changes."""
    return trainer.chunk.decoder.layers[1]


def probe(trainer: Trainer) -> Any:
    """Its MLP."""
    return second_layer(trainer).mlp


def adapter(trainer: Trainer) -> Any:
    """The adapter in it."""
    return probe(trainer).inner


def sets(owner: Callable[[Trainer], Any], name: str, value: Any) -> Callable[[Trainer], Undo]:
    """Another value of an attribute; `value` may be a function of the trainer."""

    def do(trainer: Trainer) -> Undo:
        target = owner(trainer)
        own = vars(target)
        has_own, before = name in own, getattr(target, name, None)
        setattr(target, name, value)

        def undo() -> None:
            if has_own or (isinstance(target, nn.Module) and name in target._modules):
                setattr(target, name, before)
            else:
                delattr(target, name)

        return undo

    return do


def on_class(
    owner: type[Any] | Callable[[Trainer], type[Any]], name: str, value: Any
) -> Callable[[Trainer], Undo]:
    """Another attribute of a class."""

    def do(trainer: Trainer) -> Undo:
        target: Any = owner if isinstance(owner, type) else owner(trainer)
        has_own, before = name in vars(target), vars(target).get(name)
        setattr(target, name, value(before) if callable(value) else value)
        return lambda: setattr(target, name, before) if has_own else delattr(target, name)

    return do


def in_place(
    do: Callable[[Any], None], undo: Callable[[Any], None], owner: Any = probe
) -> Callable[[Trainer], Undo]:
    """A change without an assignment."""

    def change(trainer: Trainer) -> Undo:
        do(owner(trainer))
        return lambda: undo(owner(trainer))

    return change


def halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def half(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        out, second = forward(*args, **kwargs)
        return out * 0.5, second

    return half


def patches_forward(owner: Callable[[Trainer], Any]) -> Callable[[Trainer], Undo]:
    def do(trainer: Trainer) -> Undo:
        target = owner(trainer)
        target.forward = halved(target.forward)
        return lambda: delattr(target, "forward")

    return do


def merges(trainer: Trainer) -> Undo:
    path, linear = adapter(trainer), adapter(trainer).inner.linear_fc2
    before = linear.weight.detach().clone()
    with torch.no_grad():
        linear.weight.mul_(1.5)
    path.is_merged = True

    def undo() -> None:
        with torch.no_grad():
            linear.weight.copy_(before)
        path.is_merged = False

    return undo


def replaces_layer(trainer: Trainer) -> Undo:
    layers, before = trainer.chunk.decoder.layers, second_layer(trainer)
    group_type: Any = torch.distributed.ProcessGroup
    group_type.__deepcopy__ = lambda group, _memo: group  # groups are shared, and cannot be copied
    try:
        made = copy.deepcopy(before, {id(before.config): before.config})
    finally:
        del group_type.__deepcopy__
    with torch.no_grad():
        made.mlp.inner.inner.linear_fc2.weight.mul_(0.5)
    layers[1] = made

    def undo() -> None:
        layers[1] = before

    return undo


def reorders(trainer: Trainer) -> Undo:
    layers = trainer.chunk.decoder.layers

    def swap() -> None:
        layers[0], layers[1] = layers[1], layers[0]

    swap()
    return swap


def other_list(trainer: Trainer) -> Undo:
    block = trainer.chunk.decoder
    before = block.layers
    block.layers = nn.ModuleList([before[1], before[0]])

    def undo() -> None:
        block.layers = before

    return undo


def hooks(trainer: Trainer) -> Undo:
    handle = probe(trainer).register_forward_hook(lambda _module, _args, out: (out[0] * 0.5, out[1]))
    return handle.remove


def hooks_before(trainer: Trainer) -> Undo:
    handle = probe(trainer).register_forward_pre_hook(lambda _module, args: (args[0] * 0.5, *args[1:]))
    return handle.remove


def hooks_all(trainer: Trainer) -> Undo:
    def halve(module: nn.Module, _args: Any, out: Any) -> Any:
        return (out[0] * 0.5, out[1]) if isinstance(module, Probe) else None

    handle = nn.modules.module.register_module_forward_hook(halve)
    return handle.remove


def freezes(trainer: Trainer) -> Undo:
    weight = adapter(trainer).inner.linear_fc2.weight
    weight.requires_grad_(False)

    def undo() -> None:
        weight.requires_grad_(True)

    return undo


def loads_other_shape(trainer: Trainer) -> Undo:
    owner = probe(trainer)
    before = owner.offset
    owner.offset = torch.full((2 * WIDTH,), 0.5, device=before.device, dtype=before.dtype)

    def undo() -> None:
        owner.offset = before

    return undo


def parametrizes(trainer: Trainer) -> Undo:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 0.5

    linear = adapter(trainer).inner.linear_fc2
    parametrize.register_parametrization(linear, "weight", Halved(), unsafe=True)
    return lambda: parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False) and None


def normalises_weight(trainer: Trainer) -> Undo:
    linear = adapter(trainer).inner.linear_fc2
    parametrizations.weight_norm(linear)
    with torch.no_grad():
        linear.parametrizations.weight.original0.mul_(0.5)
    return lambda: parametrize.remove_parametrizations(linear, "weight") and None


def ties(trainer: Trainer) -> Undo:
    one, other = (layer.mlp.inner.inner.linear_fc2 for layer in trainer.chunk.decoder.layers)
    before = other.weight
    other.weight = one.weight

    def undo() -> None:
        other.weight = before

    return undo


def of_all_layers(trainer: Trainer) -> Undo:
    undos = [
        sets(lambda _trainer, it=layer.mlp.inner: it, "_adapter_enabled", False)(trainer)
        for layer in trainer.chunk.decoder.layers
    ]
    return lambda: [undo() for undo in undos] and None
