# SPDX-License-Identifier: Apache-2.0
"""Notices what changed of the layers that were captured: their memory, what they train, their hooks.

Looks only; what follows from it is decided elsewhere.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from megagraph import _C
from megagraph.bank.sites import SiteSpec
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.watch.addresses import AddressWatch
from megagraph.megatron.watch.hooks import HookWatch

__all__ = ["LayerWatch"]

Ineligible = Mapping[int, tuple[EagerReason, str]]


class LayerWatch:
    """What graphs of some layers rely on.

    Args:
        specs: the sites of the layers.
    """

    def __init__(self, specs: Sequence[SiteSpec]) -> None:
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
        self._state = _C.ModuleWatch(self._modules)
        # csrc/python/fingerprint.h, Note [Module fingerprint]: what it was when nothing had changed.
        self._fingerprint: int | None = None

    def has_memory(self, *, grad: bool) -> bool:
        """Whether everything has memory, so that it can be captured.

        Args:
            grad: main gradients too.
        """
        return self._addresses.has_memory(grad=grad)

    def _layers(self) -> list[nn.Module]:
        return [spec.module for spec in self._specs]

    def _modules_of_now(self) -> list[weakref.ref[nn.Module]]:
        return [weakref.ref(module) for layer in self._layers() for module in layer.modules()]

    def _follow(self, modules: list[weakref.ref[nn.Module]]) -> None:
        if modules != self._modules:
            self._modules, self._state = modules, _C.ModuleWatch(modules)

    def modes(self) -> int:
        """A hash of the modes, training or evaluation, that the layers' modules are in now."""
        return self._state.modes()

    def expect_modules(self, ineligible: Ineligible) -> None:
        """Remembers the modules of now and their hooks; before the first capture.

        Args:
            ineligible: which layers no graph can replace, and why.
        """
        self._ineligible = ineligible
        self._hooks = HookWatch(self._layers())
        self._follow(self._modules_of_now())

    def expect_memory(self, *, grad: bool) -> None:
        """Remembers where everything lies; after each capture.

        Args:
            grad: graphs read main gradients too.
        """
        self._addresses.watch(grad=grad)
        self.is_watching = True
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
            self._follow(self._modules_of_now())  # whose modes make a kind
            return None
        if self._fingerprint is not None and self._fingerprint == self._state.fingerprint():
            return None
        reason = self._look_closely(find_ineligible)
        self._fingerprint = self._state.fingerprint() if reason is None else None
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
            self._hooks = HookWatch(self._layers())  # Megatron's own come and go
        self.have_only_gradients_moved = only_gradients
        return self._addresses.change
