# SPDX-License-Identifier: Apache-2.0
"""Changes of what a captured layer's Python reads, each with what has to follow from it."""

import functools

import torch
from changing import (
    Change,
    adapter,
    freezes,
    halved,
    hooks,
    hooks_all,
    hooks_before,
    in_place,
    loads_other_shape,
    merges,
    normalises_weight,
    of_all_layers,
    on_class,
    other_list,
    parametrizes,
    patches_forward,
    probe,
    reorders,
    replaces_layer,
    second_layer,
    sets,
    ties,
)
from state_rig import WIDTH, Adapter, Choice, Knobs, Probe, scaled
from torch import nn

from megagraph.decide.reasons import EagerReason


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
    "merged adapter": Change(do=merges),
    "adapters of all layers off": Change(do=of_all_layers),
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
    "forward of a layer": Change(do=patches_forward(second_layer)),
    "forward of a submodule": Change(do=patches_forward(lambda trainer: adapter(trainer).inner)),
    "forward of a class": Change(do=on_class(Adapter, "forward", halved)),
    "forward of Megatron's class": Change(
        do=on_class(lambda trainer: type(adapter(trainer).inner), "forward", halved)
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
    "a copy of a layer": Change(do=replaces_layer, reason=EagerReason.PARAMETERS_CHANGED, is_eager_back=True),
    "layers in another order": Change(do=reorders, reason=EagerReason.PARAMETERS_CHANGED, is_eager_back=True),
    "another list of layers": Change(
        do=other_list, reason=EagerReason.PARAMETERS_CHANGED, is_eager_back=True
    ),
    # Hooks.
    "hook": Change(do=hooks, reason=EagerReason.FOREIGN_HOOK, is_eager_back=True, stays_eager=True),
    "hook before a forward": Change(
        do=hooks_before, reason=EagerReason.FOREIGN_HOOK, is_eager_back=True, stays_eager=True
    ),
    "hook on all modules": Change(
        do=hooks_all, reason=EagerReason.FOREIGN_HOOK, is_eager_back=True, stays_eager=True
    ),
    # Parameters and buffers.
    "frozen parameter": Change(
        do=freezes, reason=EagerReason.PARAMETERS_CHANGED, is_eager_back=True, in_step=False, matters=False
    ),
    "buffer of another shape": Change(do=loads_other_shape, reason=EagerReason.ADDRESS_MOVED, in_step=False),
    "buffer in place": Change(
        do=in_place(lambda it: it.offset.fill_(0.5), lambda it: it.offset.zero_()), reason=None
    ),
    "parametrized weight": Change(
        do=parametrizes, reason=EagerReason.ADDRESS_MOVED, in_step=False, stays_eager=True, lasts=True
    ),
    "normalised weight": Change(do=normalises_weight, reason=EagerReason.ADDRESS_MOVED, in_step=False),
    "tied weights": Change(do=ties, reason=EagerReason.ADDRESS_MOVED, in_step=False, stays_eager=True),
}
