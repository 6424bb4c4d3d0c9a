# SPDX-License-Identifier: Apache-2.0
"""Changes that any model can undergo, each with what takes it back; all are of its first or last layer."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import megatron_rig as rig
from host_rig import AdaptedLinear
from megatron.core.transformer.mlp import MLP
from state_changes import Do, Undo, evaluates, first, hooks, on_class, scaled, sets
from torch import nn

import megagraph
from megagraph.bank.restore import Results
from megagraph.bank.verify import Verification
from megagraph.demo.trainer import Trainer


def last(trainer: Trainer) -> Any:
    return trainer.chunk.decoder.layers[-1]


def weight(trainer: Trainer) -> nn.Parameter:
    """One of the last layer that gets a gradient."""
    found = [param for param in last(trainer).parameters() if param.requires_grad]
    return found[0] if found else trainer.chunk.embedding.word_embeddings.weight.requires_grad_()


def scales(name: str, owner: Callable[[Trainer], Any]) -> Do:
    """Sets another method on an instance; nothing, if it has none of that name."""

    def do(trainer: Trainer) -> Undo:
        method = getattr(owner(trainer), name, None)
        return (lambda: None) if method is None else sets(name, scaled(method), owner)(trainer)

    return do


def inside(name: str) -> Callable[[Trainer], Any]:
    """A module of that name in the first layer that has one."""

    def of(trainer: Trainer) -> Any:
        found = (getattr(layer, name, None) for layer in trainer.chunk.decoder.layers)
        return next((it for it in found if it is not None and [*it.children()]), None)

    return of


def subclass(trainer: Trainer) -> Undo:
    """Another class, whose forward is its own."""
    layer, before = first(trainer), type(first(trainer))

    class Halved(before):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return scaled(super().forward)(*args, **kwargs)

    layer.__class__ = Halved
    return lambda: setattr(layer, "__class__", before)


def _fails(*_args: Any) -> None:
    raise RuntimeError("no verification")


def _noisy(least: float) -> Callable[..., contextlib.AbstractContextManager[Results]]:
    """A run of a module that is about so many times what it is, and another one each time."""

    @contextlib.contextmanager
    def run(*args: Any) -> Iterator[Results]:
        with _module_run(*args) as made:
            by = least + _NOISE.random() * 1e-6
            yield {name: it * by if it.is_floating_point() else it for name, it in made.items()}

    return run


_module_run, _NOISE = Verification._module_run, Random(0)
# Of a verification, in which one rank alone cannot go on, or has to run its modules once more, or all of it.
VERIFICATIONS = {
    "fails": partial(mock.patch.object, Verification, "_compare", _fails),
    "differs": partial(mock.patch.object, Verification, "_module_run", _noisy(1.0)),
    "lies off": partial(mock.patch.object, Verification, "_module_run", _noisy(2.0)),
}

# What a layer does wrong in captures: what it adds shows in its own output alone, on no other rank.
WRONG = ("raises", "scales", "adds")


def wrong_in_captures(trainer: Trainer, how: str) -> Undo:
    """The last layer cannot be captured, or its graphs do not compute what it does."""

    def other(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)  # with all of its collectives
        if not rig.is_capturing():
            return out
        if how == "raises":
            raise RuntimeError("no layer for a capture")
        # By another factor than that of a verification that lies off, which would find it right.
        return (out[0] * 3.0 if how == "scales" else out[0] + 1.0, *out[1:])

    forward = last(trainer).forward
    return sets("forward", other, last)(trainer)


def freezes(of: Callable[[Trainer], nn.Module]) -> Do:
    def do(trainer: Trainer) -> Undo:
        trained = nn.ParameterList(param for param in of(trainer).parameters() if param.requires_grad)
        return trained.requires_grad_(False).requires_grad_

    return do


def switches_adapters(trainer: Trainer) -> Undo:
    adapted = [it for it in trainer.chunk.modules() if isinstance(it, AdaptedLinear)]

    def switch() -> None:
        for module in adapted:
            module._adapter_enabled = not module._adapter_enabled

    switch()
    return switch


def steers(trainer: Trainer) -> Undo:
    """By a variable that no guard sees, and that is named to the plugin."""
    layer, strength = first(trainer), 0.5
    back = contextlib.ExitStack()
    back.callback(sets("forward", scaled(layer.forward, lambda: strength), first)(trainer))
    back.callback(megagraph.watch(layer, key=lambda: strength).remove)
    return back.close


CHANGES: dict[str, Do] = {
    "forward of an instance": scales("forward", first),
    "forward of an attention": scales("forward", inside("self_attention")),
    "forward of an MLP": scales("forward", inside("mlp")),
    "forward of all MLPs": on_class(MLP, "forward", scaled),
    "half of a layer": scales("_forward_mlp", first),
    "class of an instance": subclass,
    "number of a layer": sets("note", 1.0, first),
    "mode of a layer": evaluates(last),
    "frozen layer": freezes(first),
    "frozen embedding": freezes(lambda trainer: trainer.chunk.embedding),
    "all adapters": switches_adapters,
    "watched variable": steers,
    "hook behind a forward": hooks(lambda it: last(it).register_forward_hook(lambda *_: None)),
    "hook before a forward": hooks(lambda it: first(it).register_forward_pre_hook(lambda *_: None)),
    "hook behind a backward": hooks(lambda it: last(it).register_full_backward_hook(lambda *_: None)),
    "hook on a gradient": hooks(lambda it: weight(it).register_hook(lambda grad: grad * 0.5)),
    "hook after adding": hooks(lambda it: weight(it).register_post_accumulate_grad_hook(lambda _param: None)),
}
OF_FORWARDS = {name for name in CHANGES if name.split()[0] in ("forward", "half", "class", "watched")}
OF_FORWARDS |= {"forward of a layer"}
