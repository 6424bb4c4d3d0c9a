# SPDX-License-Identifier: Apache-2.0
"""Notices what changed of the layers that were captured: their memory, what they train, their state.

Looks only; what follows from it is decided elsewhere.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from megagraph import _C
from megagraph.bank.sites import SiteSpec
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.watch import keys as known_keys
from megagraph.megatron.watch.addresses import AddressWatch
from megagraph.megatron.watch.hooks import HookWatch

__all__ = ["LayerWatch"]

Ineligible = Mapping[int, tuple[EagerReason, str]]


class LayerWatch:
    """What graphs of some layers rely on.

    Args:
        specs: the sites of the layers.
        block: whose layers they are.
        keys: asked between steps for functions whose results are part of the layers' state.
        is_expected_hook: whether the caller answers for a hook of a module.
        left_out: names of attributes that are no part of the state.
        stay_eager: layers, by index, that are no part of it either.
    """

    def __init__(
        self,
        specs: Sequence[SiteSpec],
        block: nn.Module,
        *,
        keys: Callable[[], list[Callable[[], Any]]],
        is_expected_hook: Callable[[Callable[..., Any]], bool],
        left_out: Collection[str],
        stay_eager: Collection[int] = (),
    ) -> None:
        self._specs = specs
        self._ineligible: Ineligible = {}
        self._hooks: HookWatch | None = None
        self._addresses = AddressWatch(specs)
        self.is_watching = False  # until something was captured
        # Whether graphs read main gradients that had no memory when `what_changed()` was last asked.
        self.are_gradients_away = False
        # What it found was main gradients that have moved, and nothing else.
        self.have_only_gradients_moved = False
        # Weakly, as hooks and modules may hold the model.
        self._modules = self._modules_of_now()
        self._memory = _C.ModuleWatch(self._modules)
        # csrc/watch/fingerprint.h, Note [Module fingerprint]: what it was when nothing had changed.
        self._fingerprint: int | None = None
        # Whether parameters held a `.grad` beside their `main_grad` when the step began.
        self.have_other_grads = False
        self._is_expected_hook = is_expected_hook
        self._left_out = left_out
        self.stay_eager = frozenset(stay_eager)
        self._keys = keys
        self._block = weakref.ref(block)
        self._watch_state()

    def _watch_state(self) -> None:
        self._keys_seen = known_keys.num_changes
        guarded = [spec for index, spec in enumerate(self._specs) if index not in self.stay_eager]
        modules = [weakref.ref(module) for spec in guarded for module in spec.modules()]
        layer_list = getattr(self._block(), "layers", None)
        modules += [weakref.ref(layer_list)] if isinstance(layer_list, nn.Module) else []
        self._state = _C.StateWatch(
            modules, self._block, self._left_out, self._is_expected_hook, self._keys()
        )
        # Asked in each call for a hash of the state of now, csrc/watch/state_watch.h, Note [State]. With
        # True, what lists and sets hold is read, too.
        self.state: Callable[[bool], int] = self._state.now

    def has_memory(self, *, grad: bool) -> bool:
        """Whether everything has memory, so that it can be captured.

        Args:
            grad: main gradients too.
        """
        return self._addresses.has_memory(grad=grad)

    def _hooked(self) -> list[nn.Module]:
        return [module for spec in self._specs for module in spec.modules()]

    def _modules_of_now(self) -> list[weakref.ref[nn.Module]]:
        return [weakref.ref(module) for spec in self._specs for module in spec.modules()]

    def _follow(self, modules: list[weakref.ref[nn.Module]]) -> None:
        if modules != self._modules:
            self._modules, self._memory = modules, _C.ModuleWatch(modules)
            self._watch_state()

    def whole_state(self) -> int:
        """Between steps: `state(True)`, with the functions that are part of it by now."""
        if self._keys_seen != known_keys.num_changes:
            self._watch_state()
        return self.state(True)

    def state_items(self) -> list[tuple[str, int, str]]:
        """Every value of the state: its name, its hash, and what it is in words."""
        names = [
            f"{spec.short_name}{f'.{name}' if name else ''}"
            for index, spec in enumerate(self._specs)
            if index not in self.stay_eager
            for name, _module in spec.named_modules()
        ]
        names += ["the list of layers", "all modules"]
        return [
            (f"{names[index]}: {name}", value, words) for index, name, value, words in self._state.items()
        ]

    def leave_out(self, stay_eager: Collection[int]) -> bool:
        """Takes layers that stay eager, by index, out of the state.

        Returns:
            Whether the state's hash is another one from now on.
        """
        if set(stay_eager) == self.stay_eager:
            return False
        self.stay_eager = frozenset(stay_eager)
        self._watch_state()
        return True

    def names_left_out(self) -> set[str]:
        """Of the names that are no part of the state those that modules or their configurations have."""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        configs = {id(config): config for module in modules if (config := vars(module).get("config"))}
        owners = [vars(owner) for owner in (*modules, *configs.values()) if hasattr(owner, "__dict__")]
        return {name for name in self._left_out if any(name in attributes for attributes in owners)}

    def follow_modules(self) -> None:
        """Watches the modules that the layers have now."""
        self._follow(self._modules_of_now())

    def expect_modules(self, ineligible: Ineligible) -> None:
        """Remembers the modules of now and their hooks; before the first capture.

        Args:
            ineligible: which layers no graph can replace, and why.
        """
        self._ineligible = ineligible
        self._hooks = HookWatch(self._hooked())
        self.follow_modules()

    def expect_memory(self, *, grad: bool) -> None:
        """Remembers where everything lies; after each capture.

        Args:
            grad: graphs read main gradients too.
        """
        self._addresses.watch(grad=grad)
        self.is_watching = True
        self._memory.fingerprint()
        self.have_other_grads = self._memory.have_other_grads
        self._fingerprint = None

    def forget_gradients(self) -> None:
        """No graph reads main gradients any more."""
        self._addresses.forget_gradients()
        self.are_gradients_away = False
        self._fingerprint = None

    def what_changed(self, find_ineligible: Callable[[], Ineligible]) -> EagerReason | None:
        """Why the graphs must not be replayed any more: moved memory, other trainables or modules, hooks.

        Args:
            find_ineligible: which layers no graph can replace now; asked where hooks have changed.
        """
        self.have_only_gradients_moved = False
        if not self.is_watching:
            self.follow_modules()  # whose state makes a kind
            return None
        is_as_it_was = self._memory.fingerprint() == self._fingerprint
        addresses = self._addresses
        if addresses.holds_state:
            is_as_it_was = is_as_it_was and not addresses.has_other_state()
        self.have_other_grads = self._memory.have_other_grads
        if is_as_it_was:
            return None
        reason = self._look_closely(find_ineligible)
        self._fingerprint = self._memory.fingerprint() if reason is None else None
        return reason

    def _look_closely(self, find_ineligible: Callable[[], Ineligible]) -> EagerReason | None:
        self._addresses.look()
        self.are_gradients_away = self._addresses.are_gradients_away
        only_gradients = self._addresses.is_of_gradients_alone
        if self._addresses.change is not None and not only_gradients:
            return self._addresses.change
        if self._modules_of_now() != self._modules:
            return EagerReason.PARAMETERS_CHANGED
        if self._hooks is not None and self._hooks.has_changed():
            changed = {*find_ineligible().items()} ^ {*self._ineligible.items()}
            if changed:
                return min(reason for _index, (reason, _what) in changed)
            self._hooks = HookWatch(self._hooked())  # Megatron's own come and go
        self.have_only_gradients_moved = only_gradients
        return self._addresses.change
