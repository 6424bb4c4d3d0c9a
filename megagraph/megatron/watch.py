# SPDX-License-Identifier: Apache-2.0
"""What graphs rely on and that may change between steps: memory, modules, their state.

State that only its owner knows is what functions return that a host has named for modules.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megagraph import _C
from megagraph.bank.sites import SiteSpec
from megagraph.megatron.seams import YARN_EMBEDDING

__all__ = ["IGNORED_ATTRIBUTES", "LayerWatch", "keys_of", "watch", "weakly"]

Key = Callable[[], Any]

# Of each module, which is held weakly, by the number of their handle. They hold whatever they hold.
_keys: weakref.WeakKeyDictionary[nn.Module, OrderedDict[int, Key]] = weakref.WeakKeyDictionary()


def watch(module: nn.Module, *, key: Key) -> RemovableHandle:
    """Makes what `key()` returns part of the state that graphs of a module are captured in.

    For state that a forward reads and that stands in no attribute of a module: a variable of a closure, a
    global, an environment variable. If it returns another value than when the layers were captured, they run
    eager (`STATE_CHANGED`), and are captured for that value too.

    Args:
        module: a layer, any module inside, or the model around it.
        key: called without arguments before each call of the model. What it returns is compared by value
            if it is a number, a flag, text, an enumeration, or a tuple, list, set or dictionary of these;
            anything else by identity.

    Returns:
        A handle: `handle.remove()` takes the function back.

    Raises:
        TypeError: if one of the two is something else, naming it.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"watch(): expected a torch.nn.Module, got {type(module).__name__}")
    if not callable(key):
        raise TypeError(f"watch(): key: expected a function without arguments, got {type(key).__name__}")
    keys = _keys.setdefault(module, OrderedDict())
    handle = RemovableHandle(keys)
    keys[handle.id] = key
    return handle


def _registered() -> list[int]:
    """The numbers of the functions that there are."""
    return [number for keys in _keys.values() for number in keys]


def keys_of(model: nn.Module) -> list[Key]:
    """The functions for a model, for what is inside of it, and for what it is inside of."""
    inside = set(model.modules())
    return [
        key
        for module, keys in _keys.items()
        if module in inside or any(child is model for child in module.modules())
        for key in keys.values()
    ]


def weakly(held: Any) -> Callable[[], Any]:
    """Gives what is held as long as somebody else keeps it; for ever if nothing can refer to it weakly."""
    try:
        return weakref.ref(held)
    except TypeError:
        return lambda: held


# Attributes that are no part of a state: Megatron sets them in each step, micro-batch or call, and no kernel
# that is captured depends on what was there before.
IGNORED_ATTRIBUTES = frozenset(
    {
        # Which micro-batch runs: of use to fp8, which is refused, and to graphs of Megatron's own.
        *("is_first_microbatch", "current_microbatch"),
        # What a call, or the plan of a micro-batch, makes for the time until its backward.
        *("input_layernorm_checkpoint", "pre_mlp_norm_checkpoint", "activation_checkpoint"),
        *("norm_out_checkpoint", "mlp_norm_manager", "backward_dw_wrapper"),
        # Whether a mixer's decoding has to look at its weights again.
        "_A_neg_exp_cache_stale",
        # How far YaRN's cosines go by now. Graphs read tables of their own (graphs/layer_arguments.py).
        *("max_seq_len_cached", "offset_cached", "dtype_cached", "packed_seq_cached"),
        # What schedules ask of a configuration, and no layer does.
        *("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func"),
        *("grad_scale_func", "moe_grad_scale_func", "mtp_grad_scale_func", "timers"),
        "experimental_attention_variant_loss_scale_func",
    }
)


def _modules_of(specs: Sequence[SiteSpec], out: Collection[int]) -> list[tuple[nn.Module, bool, bool]]:
    """The modules of the sites that are there, and whether graphs read parameters and buffers of theirs."""
    # New parameters may let sites in that are `out`; their buffers may be others after each call.
    # Which has cosines that a longer pack replaces. Graphs read their own tables: graphs/layer_arguments.py.
    yarn = YARN_EMBEDDING.owner()
    return [
        (module, is_read := module in owners and not isinstance(module, yarn), is_read and index not in out)
        for index, spec in enumerate(specs)
        if not spec.is_gone
        for owners in [{*spec.owners()}]
        for module in spec.modules()
    ]


def _state_of(specs: Sequence[SiteSpec]) -> list[Tensor]:
    """What graphs of the sites that are there write and no module owns."""
    # Scopes name the same for all of their sites.
    each = {spec.state: spec for spec in specs if not spec.is_gone}.values()
    return [tensor for spec in each for tensor in spec.state(spec.module)]


class LayerWatch(_C.ModuleWatch):
    """What graphs of layers rely on: csrc/watch/module_watch.h, Note [Module watch], and the layers' state.

    The state has what functions return that `keys` is asked for between steps. No part of it are hooks that
    the caller answers for, and layers, by index, that `stay_eager`.
    """

    def __init__(
        self,
        specs: Sequence[SiteSpec],
        block: nn.Module,
        *,
        keys: Callable[[], list[Key]],
        is_expected_hook: Callable[[Callable[..., Any]], bool],
        stay_eager: Collection[int] = (),
    ) -> None:
        self.stay_eager = out = sorted(stay_eager)  # one list, which the first function knows
        super().__init__(lambda: _modules_of(specs, out), lambda: _state_of(specs))
        self._specs, self._keys, self._is_expected_hook = specs, keys, is_expected_hook
        self._block = weakref.ref(block)  # which hooks and modules may hold, as the model
        self.follow_modules()

    def follow_modules(self) -> None:
        """Watches the modules that the layers have now."""
        if self.follow():
            self._watch_state()

    def _watch_state(self) -> None:
        guarded = [
            (spec.within(name), module)
            for index, spec in enumerate(self._specs)
            if index not in self.stay_eager and not spec.is_gone
            for name, module in spec.named_modules()
        ]
        parameters = (parameter for _name, module in guarded for parameter in module.parameters())
        device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        layer_list = getattr(self._block(), "layers", None)
        if isinstance(layer_list, nn.Module):
            guarded.append(("the list of layers", layer_list))
        # Kept, since a module may be gone by the time that somebody asks what has changed.
        self._names = [*(name for name, _module in guarded), "all modules"]
        modules = [weakref.ref(module) for _name, module in guarded]
        self._state = _C.StateWatch(modules, self._block, IGNORED_ATTRIBUTES, self._is_expected_hook, device)
        self._ask_keys()
        self.set_state(self._state)

    def _ask_keys(self) -> None:
        self._keys_seen = _registered()
        self._state.set_keys(self._keys())

    def has_keys_of_now(self) -> bool:
        """Whether the functions that are part of the state are all that there are by now."""
        return self._keys_seen == (_registered() if _keys else [])

    def whole_state(self) -> int:
        """Between steps: `state(True)`, with the functions that are part of it by now."""
        if not self.has_keys_of_now():
            self._ask_keys()
        return self.state(True)

    def state_items(self) -> dict[str, tuple[int, str]]:
        """The first value of the state with each name: its hash, and what it is in words."""
        items: dict[str, tuple[int, str]] = {}
        for index, name, value, words in self._state.items():
            items.setdefault(f"{self._names[index]}: {name}", (value, words))
        return items

    def leave_out(self, stay_eager: Collection[int]) -> bool:
        """Takes layers that stay eager out of the state. Whether its hash is another one from now on."""
        if sorted(stay_eager) == self.stay_eager:
            return False
        self.stay_eager[:] = sorted(stay_eager)
        self.follow_anew()
        self._watch_state()
        return True

    def names_left_out(self) -> set[str]:
        """Of the names that are no part of the state those that modules or their configurations have."""
        modules = [module for spec in self._specs for module in spec.modules()]
        configs = {id(config): config for module in modules if (config := vars(module).get("config"))}
        owners = [vars(owner) for owner in (*modules, *configs.values()) if hasattr(owner, "__dict__")]
        return {name for name in IGNORED_ATTRIBUTES if any(name in attributes for attributes in owners)}
