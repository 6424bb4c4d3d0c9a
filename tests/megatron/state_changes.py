# SPDX-License-Identifier: Apache-2.0
"""An MLP that reads a value of each kind, and changes of what a captured layer's Python reads."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from host_rig import AdaptedLinear
from megatron_rig import OPTIONS
from torch import Tensor, nn
from torch.nn.utils import parametrize

from megagraph.demo.trainer import Trainer
from megagraph.reasons import EagerReason

Undo = Callable[[], None]
Do = Callable[[Trainer], Undo]
WIDTH = OPTIONS.hidden
DTYPE = torch.bfloat16 if OPTIONS.bf16 else torch.float32


@dataclass
class Knobs:
    gain: float = 1.0


def identity(hidden: Tensor) -> Tensor:
    return hidden


def halves(hidden: Tensor) -> Tensor:
    return hidden * 0.5


class Probe(nn.Module):
    """Megatron's MLP, with an output that depends on a value of each kind."""

    config: Any

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config
        inner.linear_fc1 = AdaptedLinear(inner.linear_fc1, rank=4)
        self.knobs = Knobs()
        self.number, self.text = 1.0, "plain"
        self.names = ["plain"]
        self.function: Callable[[Tensor], Tensor] = identity
        device = inner.linear_fc2.weight.device
        self.vector = torch.ones(WIDTH, device=device, dtype=DTYPE)
        self.register_buffer("offset", torch.zeros(WIDTH, device=device, dtype=DTYPE))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Probe":
        super()._apply(fn, recurse)
        self.vector = fn(self.vector)  # as modules do that keep tensors in plain attributes
        return self

    @property
    def computed(self) -> float:
        return 1.0

    def factor(self) -> float:
        """What plain values make of the output."""
        found = self.number * self.computed * self.knobs.gain
        for is_other in (
            *(self.text == "negated", "negated" in self.names, not self.training),
            getattr(self.config, "probe_gain", 1.0) != 1.0,
        ):
            found *= -0.5 if is_other else 1.0
        return found

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.inner(hidden, *args, **kwargs)
        out = self.function(out * self.factor())
        return self.norm(out + self.offset[:WIDTH]) * self.vector, bias


# -- what changes, and how: all of it in the second layer --------------------------------------------


def first(trainer: Trainer) -> Any:
    return trainer.chunk.decoder.layers[0]


def probe(trainer: Trainer) -> Any:
    return trainer.chunk.decoder.layers[1].mlp


def adapter(trainer: Trainer) -> Any:
    return probe(trainer).inner.linear_fc1


def fc2(trainer: Trainer) -> Any:
    return probe(trainer).inner.linear_fc2


def sets(name: str, value: Any, owner: Callable[[Trainer], Any] = probe) -> Do:
    def do(trainer: Trainer) -> Undo:
        target = owner(trainer)
        own = vars(target)
        tables = [own, *(own.get(it, {}) for it in ("_modules", "_parameters", "_buffers"))]
        has_own, before = any(name in table for table in tables), getattr(target, name, None)
        setattr(target, name, value)
        if has_own:
            return lambda: setattr(target, name, before)
        return lambda: delattr(target, name)

    return do


def on_class(owner: type[Any], name: str, value: Any) -> Do:
    """Another attribute of a class; `value` may be a function of what was there."""

    def do(_trainer: Trainer) -> Undo:
        before = vars(owner)[name]
        setattr(owner, name, value(before) if callable(value) else value)
        return lambda: setattr(owner, name, before)

    return do


def in_place(do: Callable[[Any], Any], undo: Callable[[Any], Any], owner: Any = probe) -> Do:
    def change(trainer: Trainer) -> Undo:
        do(owner(trainer))
        return lambda: undo(owner(trainer))

    return change


def evaluates(owner: Callable[[Trainer], Any]) -> Do:
    return in_place(lambda it: it.eval(), lambda it: it.train(), owner)


def scaled(forward: Callable[..., Any], by: Callable[[], float] = lambda: 0.5) -> Callable[..., Any]:
    """One whose first output is so many times as much."""

    @functools.wraps(forward)
    def other(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return (out[0] * by(), *out[1:]) if isinstance(out, tuple) else out * by()

    return other


def replaces_layer(trainer: Trainer) -> Undo:
    layers, before = trainer.chunk.decoder.layers, trainer.chunk.decoder.layers[1]
    # Groups are shared, and cannot be copied.
    copies = {"__deepcopy__": lambda group, _memo: group, "create": True}
    with mock.patch.multiple(torch.distributed.ProcessGroup, **copies):
        layers[1] = copy.deepcopy(before, {id(before.config): before.config})
    fc2(trainer).weight.detach().mul_(0.5)
    return lambda: layers.__setitem__(1, before)


def other_list(trainer: Trainer) -> Undo:
    block = trainer.chunk.decoder
    return sets("layers", nn.ModuleList(reversed(block.layers)), lambda _: block)(trainer)


def hooks(register: Callable[[Trainer], Any]) -> Do:
    """What `register` answers has `remove()`."""
    return lambda trainer: register(trainer).remove


def hooks_all(trainer: Trainer) -> Undo:
    def halve(module: nn.Module, _args: Any, out: Any) -> Any:
        return (out[0] * 0.5, out[1]) if isinstance(module, Probe) else None

    return nn.modules.module.register_module_forward_hook(halve).remove


def parametrizes(trainer: Trainer) -> Undo:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 0.5

    linear = fc2(trainer)
    parametrize.register_parametrization(linear, "weight", Halved(), unsafe=True)
    return lambda: parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False) and None


def of_all(do: Do, trainers: Sequence[Trainer]) -> Undo:
    """Makes a change of some models; once, if it is of all that there are. Returns what takes it back."""
    is_shared = do.__qualname__.startswith(("on_class", "hooks_all"))
    undos = [do(trainer) for trainer in (trainers[:1] if is_shared else trainers)]
    return lambda: [undo() for undo in reversed(undos)] and None


# -- the table ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Change:
    do: Do  # makes it; returns what takes it back
    reason: EagerReason | None = EagerReason.STATE_CHANGED  # of the step after it; None where layers replay
    is_eager_back: bool = False  # taking it back costs an eager step, too; memory that moves again does not
    stays_eager: bool = False  # the changed layer is not captured while it lasts
    lasts: bool = False  # it cannot be taken back
    matters: bool = True  # eager's own losses are others afterwards


STATES: dict[str, Do] = {
    "adapter off": sets("_adapter_enabled", False, adapter),
    "float": sets("number", 0.5),
    "text": sets("text", "negated"),
    "function": sets("function", halves),
    "tensor": lambda trainer: sets("vector", probe(trainer).vector * 0.5)(trainer),
    "configuration of its own": sets("gain", 0.5, lambda trainer: probe(trainer).knobs),
    "another configuration": sets("knobs", Knobs(gain=0.5)),
    "Megatron's configuration": sets("probe_gain", 0.5, lambda trainer: probe(trainer).config),
    "mode of one module": evaluates(probe),
    "mode of the model": evaluates(lambda trainer: trainer.chunk),
    # Of the first one: behind the last one is a norm, to which half of everything is the same.
    "forward of a layer": lambda trainer: sets("forward", scaled(first(trainer).forward), first)(trainer),
    "forward of a class": on_class(AdaptedLinear, "forward", scaled),
    "property of a class": on_class(Probe, "computed", lambda _before: property(lambda self: 0.5)),
    # Of what lies behind an attribute: seen between steps alone.
    "list in place": in_place(lambda it: it.names.append("negated"), lambda it: it.names.remove("negated")),
}
MODULES: dict[str, Do] = {
    "another norm": sets("norm", nn.LayerNorm(WIDTH, eps=0.5, elementwise_affine=False)),
    "a copy of a layer": replaces_layer,
    "another list of layers": other_list,
}
HOOKS: dict[str, Do] = {
    "hook": hooks(lambda it: probe(it).register_forward_hook(lambda _it, _args, out: (out[0] * 0.5, out[1]))),
    "hook on all modules": hooks_all,
}
# Bug: one on the accumulation of a gradient that came after the capture never ran.
BACKWARD_HOOKS: dict[str, Do] = {
    "hook behind a backward": hooks(lambda it: probe(it).register_full_backward_hook(lambda *_: None)),
    "hook on a gradient": hooks(lambda it: fc2(it).weight.register_hook(lambda grad: grad * 0.5)),
    "hook after adding": hooks(lambda it: fc2(it).weight.register_post_accumulate_grad_hook(lambda _: None)),
}
IN_PLACE: dict[str, Do] = {
    "tensor in place": in_place(lambda it: it.vector.mul_(0.5), lambda it: it.vector.mul_(2.0)),
    "buffer in place": in_place(lambda it: it.offset.fill_(0.5), lambda it: it.offset.zero_()),
}
_OTHERS, _MOVED = EagerReason.PARAMETERS_CHANGED, EagerReason.ADDRESS_MOVED
_FOREIGN: dict[str, Any] = {"reason": EagerReason.FOREIGN_HOOK, "is_eager_back": True, "stays_eager": True}
CHANGES: dict[str, Change] = {
    **{name: Change(do=do) for name, do in STATES.items()},
    **{name: Change(do=do, reason=_OTHERS, is_eager_back=True) for name, do in MODULES.items()},
    **{name: Change(do=do, **_FOREIGN) for name, do in HOOKS.items()},
    **{name: Change(do=do, matters=False, **_FOREIGN) for name, do in BACKWARD_HOOKS.items()},
    **{name: Change(do=do, reason=None) for name, do in IN_PLACE.items()},
    "frozen parameter": Change(
        do=in_place(lambda it: it.weight.requires_grad_(False), lambda it: it.weight.requires_grad_(), fc2),
        matters=False,
    ),
    "buffer of another shape": Change(
        do=lambda trainer: sets("offset", torch.full_like(probe(trainer).offset, 0.5).repeat(2))(trainer),
        reason=_MOVED,
    ),
    "parametrized weight": Change(do=parametrizes, reason=_MOVED, stays_eager=True, lasts=True),
    "tied weights": Change(
        do=lambda trainer: sets("weight", first(trainer).mlp.inner.linear_fc2.weight, fc2)(trainer),
        reason=_MOVED,
        stays_eager=True,
    ),
}
