# SPDX-License-Identifier: Apache-2.0
"""Changes of what a captured layer's Python reads, each with what has to follow from it."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from state_rig import WIDTH, Adapter, Choice, Knobs, Probe, scaled
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


def _halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def half(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        out, second = forward(*args, **kwargs)
        return out * 0.5, second

    return half


def _patches_forward(owner: Callable[[Trainer], Any]) -> Callable[[Trainer], Undo]:
    def do(trainer: Trainer) -> Undo:
        target = owner(trainer)
        target.forward = _halved(target.forward)
        return lambda: delattr(target, "forward")

    return do


def _merges(trainer: Trainer) -> Undo:
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


def _replaces_layer(trainer: Trainer) -> Undo:
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


def _reorders(trainer: Trainer) -> Undo:
    layers = trainer.chunk.decoder.layers

    def swap() -> None:
        layers[0], layers[1] = layers[1], layers[0]

    swap()
    return swap


def _other_list(trainer: Trainer) -> Undo:
    block = trainer.chunk.decoder
    before = block.layers
    block.layers = nn.ModuleList([before[1], before[0]])

    def undo() -> None:
        block.layers = before

    return undo


def _hooks(trainer: Trainer) -> Undo:
    handle = probe(trainer).register_forward_hook(lambda _module, _args, out: (out[0] * 0.5, out[1]))
    return handle.remove


def _hooks_before(trainer: Trainer) -> Undo:
    handle = probe(trainer).register_forward_pre_hook(lambda _module, args: (args[0] * 0.5, *args[1:]))
    return handle.remove


def _hooks_all(trainer: Trainer) -> Undo:
    def halve(module: nn.Module, _args: Any, out: Any) -> Any:
        return (out[0] * 0.5, out[1]) if isinstance(module, Probe) else None

    handle = nn.modules.module.register_module_forward_hook(halve)
    return handle.remove


def _freezes(trainer: Trainer) -> Undo:
    weight = adapter(trainer).inner.linear_fc2.weight
    weight.requires_grad_(False)

    def undo() -> None:
        weight.requires_grad_(True)

    return undo


def _loads_other_shape(trainer: Trainer) -> Undo:
    owner = probe(trainer)
    before = owner.offset
    owner.offset = torch.full((2 * WIDTH,), 0.5, device=before.device, dtype=before.dtype)

    def undo() -> None:
        owner.offset = before

    return undo


def _parametrizes(trainer: Trainer) -> Undo:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 0.5

    linear = adapter(trainer).inner.linear_fc2
    parametrize.register_parametrization(linear, "weight", Halved(), unsafe=True)
    return lambda: parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False) and None


def _normalises_weight(trainer: Trainer) -> Undo:
    linear = adapter(trainer).inner.linear_fc2
    parametrizations.weight_norm(linear)
    with torch.no_grad():
        linear.parametrizations.weight.original0.mul_(0.5)
    return lambda: parametrize.remove_parametrizations(linear, "weight") and None


def _ties(trainer: Trainer) -> Undo:
    one, other = (layer.mlp.inner.inner.linear_fc2 for layer in trainer.chunk.decoder.layers)
    before = other.weight
    other.weight = one.weight

    def undo() -> None:
        other.weight = before

    return undo


class Other(Probe):
    """Another class of the same attributes."""

    def factor(self) -> float:
        return -0.5 * super().factor()


STATE = EagerReason.STATE_CHANGED
CHANGES: dict[str, Change] = {
    # Adapters.
    "adapter off": Change(do=sets(adapter, "_adapter_enabled", False)),
    "adapter scaling": Change(
        do=in_place(
            lambda it: it.scaling.update(first=2.0), lambda it: it.scaling.update(first=1.0), adapter
        ),
        in_step=False,
    ),
    "another adapter": Change(do=sets(adapter, "active", ["second"])),
    "one adapter more": Change(
        do=in_place(lambda it: it.active.append("second"), lambda it: it.active.remove("second"), adapter),
        in_step=False,
    ),
    "merged adapter": Change(do=_merges),
    "adapters of all layers off": Change(do=lambda trainer: _of_all_layers(trainer)),
    # Plain values.
    "float": Change(do=sets(probe, "number", 0.5)),
    "float of the same hash": Change(do=sets(probe, "number", 2.0**61)),
    "integer": Change(do=sets(probe, "count", 2)),
    "integer of the same hash": Change(do=sets(probe, "count", -2)),
    "flag": Change(do=sets(probe, "flag", False)),
    "text": Change(do=sets(probe, "text", "negated")),
    "enumeration": Change(do=sets(probe, "choice", Choice.NEGATED)),
    "dtype": Change(do=sets(probe, "dtype", torch.float16)),
    "tuple": Change(do=sets(probe, "shape", (0.5, (1.0,)))),
    "nested tuple": Change(do=sets(probe, "shape", (1.0, (0.5,)))),
    "value for None": Change(do=sets(probe, "maybe", 0.5)),
    "another list": Change(do=sets(probe, "names", ["negated"])),
    "list in place": Change(
        do=in_place(lambda it: it.names.append("negated"), lambda it: it.names.remove("negated")),
        in_step=False,
    ),
    "dictionary in place": Change(
        do=in_place(lambda it: it.table.update(gain=0.5), lambda it: it.table.update(gain=1.0)), in_step=False
    ),
    "new attribute over the class's": Change(do=sets(probe, "shared", 0.5)),
    # Callables and tensors.
    "function": Change(do=sets(probe, "function", scaled)),
    "lambda": Change(do=sets(probe, "function", lambda hidden: hidden * 0.5)),
    "partial": Change(do=sets(probe, "partial", functools.partial(scaled, by=0.5))),
    "tensor": Change(do=lambda trainer: sets(probe, "vector", probe(trainer).vector * 0.5)(trainer)),
    "tensor in place": Change(
        do=in_place(lambda it: it.vector.mul_(0.5), lambda it: it.vector.mul_(2.0)), reason=None
    ),
    # Configurations.
    "configuration of its own": Change(do=sets(lambda trainer: probe(trainer).knobs, "gain", 0.5)),
    "configuration in a configuration": Change(
        do=sets(lambda trainer: probe(trainer).knobs.inner, "gain", 0.5), in_step=False
    ),
    "another configuration": Change(do=sets(probe, "knobs", Knobs(gain=0.5))),
    "Megatron's configuration": Change(do=sets(lambda trainer: probe(trainer).config, "probe_gain", 0.5)),
    "epsilon of a norm": Change(do=sets(lambda trainer: probe(trainer).norm, "eps", 0.5)),
    # Modes.
    "mode of one module": Change(do=in_place(lambda it: it.eval(), lambda it: it.train())),
    "mode of one layer": Change(do=in_place(lambda it: it.eval(), lambda it: it.train(), second_layer)),
    "mode of the model": Change(
        do=in_place(lambda it: it.eval(), lambda it: it.train(), lambda trainer: trainer.chunk)
    ),
    # Forwards and classes.
    "forward of a layer": Change(do=_patches_forward(second_layer)),
    "forward of a submodule": Change(do=_patches_forward(lambda trainer: adapter(trainer).inner)),
    "forward of a class": Change(do=on_class(Adapter, "forward", _halved)),
    "forward of Megatron's class": Change(
        do=on_class(lambda trainer: type(adapter(trainer).inner), "forward", _halved)
    ),
    "method of a class": Change(do=on_class(Probe, "factor", lambda _before: lambda self: 0.25)),
    "property of a class": Change(do=on_class(Probe, "computed", lambda _before: property(lambda self: 0.5))),
    "value of a class": Change(do=on_class(Probe, "shared", 0.5)),
    "another class": Change(
        do=in_place(lambda it: setattr(it, "__class__", Other), lambda it: setattr(it, "__class__", Probe)),
        in_step=False,
    ),
    # Modules.
    "another submodule": Change(
        do=sets(probe, "gate", nn.Tanh()), reason=EagerReason.PARAMETERS_CHANGED, is_eager_back=True
    ),
    "another norm": Change(
        do=sets(probe, "norm", nn.LayerNorm(WIDTH, eps=0.5, elementwise_affine=False)),
        reason=EagerReason.PARAMETERS_CHANGED,
        is_eager_back=True,
    ),
    "a copy of a layer": Change(
        do=_replaces_layer, reason=EagerReason.PARAMETERS_CHANGED, is_eager_back=True
    ),
    "layers in another order": Change(
        do=_reorders, reason=EagerReason.PARAMETERS_CHANGED, is_eager_back=True
    ),
    "another list of layers": Change(
        do=_other_list, reason=EagerReason.PARAMETERS_CHANGED, is_eager_back=True
    ),
    # Hooks.
    "hook": Change(do=_hooks, reason=EagerReason.FOREIGN_HOOK, is_eager_back=True, stays_eager=True),
    "hook before a forward": Change(
        do=_hooks_before, reason=EagerReason.FOREIGN_HOOK, is_eager_back=True, stays_eager=True
    ),
    "hook on all modules": Change(
        do=_hooks_all, reason=EagerReason.FOREIGN_HOOK, is_eager_back=True, stays_eager=True
    ),
    # Parameters and buffers.
    "frozen parameter": Change(
        do=_freezes, reason=EagerReason.PARAMETERS_CHANGED, is_eager_back=True, in_step=False, matters=False
    ),
    "buffer of another shape": Change(do=_loads_other_shape, reason=EagerReason.ADDRESS_MOVED, in_step=False),
    "buffer in place": Change(
        do=in_place(lambda it: it.offset.fill_(0.5), lambda it: it.offset.zero_()), reason=None
    ),
    "parametrized weight": Change(
        do=_parametrizes, reason=EagerReason.ADDRESS_MOVED, in_step=False, stays_eager=True, lasts=True
    ),
    "normalised weight": Change(do=_normalises_weight, reason=EagerReason.ADDRESS_MOVED, in_step=False),
    "tied weights": Change(do=_ties, reason=EagerReason.ADDRESS_MOVED, in_step=False, stays_eager=True),
}


def _of_all_layers(trainer: Trainer) -> Undo:
    undos = [
        sets(lambda _trainer, it=layer.mlp.inner: it, "_adapter_enabled", False)(trainer)
        for layer in trainer.chunk.decoder.layers
    ]
    return lambda: [undo() for undo in undos] and None
