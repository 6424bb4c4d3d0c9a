# SPDX-License-Identifier: Apache-2.0
"""Notices what changed of the layers that were captured: their memory, what they train, their hooks.

Looks only; what follows from it is decided elsewhere.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from megagraph import _C
from megagraph.dispatch import EagerReason
from megagraph.eligibility import HookWatch
from megagraph.megatron.memory import MemoryWatch
from megagraph.sites import SiteSpec

__all__ = ["LayerWatch"]

Ineligible = Mapping[int, tuple[EagerReason, str]]


class LayerWatch:
    """What graphs of some layers rely on.

    Args:
        specs: the sites of the layers.
        find_ineligible: which layers no graph can replace, and why.
    """

    def __init__(self, specs: Sequence[SiteSpec], find_ineligible: Callable[[], Ineligible]) -> None:
        self._specs = specs
        self._find_ineligible = find_ineligible
        self._ineligible: Ineligible = {}
        self._hooks: HookWatch | None = None
        self.memory = MemoryWatch(specs)
        # csrc/python/fingerprint.h, Note [Module fingerprint]: what it was when nothing had changed.
        self._fingerprint: int | None = None
        self._modules: list[weakref.ref[nn.Module]] = []

    @property
    def is_watching(self) -> bool:
        """Whether anything was captured."""
        return self.memory.is_watching

    def expect_hooks(self) -> None:
        """Remembers the hooks of now and what they keep from being graphed; before the first capture."""
        self._ineligible = self._find_ineligible()
        self._hooks = HookWatch([spec.module for spec in self._specs])

    def expect_memory(self, *, grad: bool) -> None:
        """Remembers where everything lies; after each capture.

        Args:
            grad: graphs read main gradients too.
        """
        self.memory.watch(grad=grad)
        self._fingerprint = None

    def what_changed(self) -> EagerReason | None:
        """Why the graphs must not be replayed any more, or None: moved memory, other trainables, hooks."""
        if not self.is_watching:
            return None
        if self._fingerprint is not None and self._fingerprint == _C.module_fingerprint(self._modules):
            return None
        reason = self._look_closely()
        self._fingerprint = None
        if reason is None:
            self._modules = [weakref.ref(module) for spec in self._specs for module in spec.module.modules()]
            self._fingerprint = _C.module_fingerprint(self._modules)
        return reason

    def _look_closely(self) -> EagerReason | None:
        reason = self.memory.what_changed()
        if reason is not None:
            return reason
        if self._hooks is None or not self._hooks.has_changed():
            return None
        changed = {*self._find_ineligible().items()} ^ {*self._ineligible.items()}
        if not changed:
            self._hooks = HookWatch([spec.module for spec in self._specs])  # Megatron's own come and go
        return min((reason for _rank, (reason, _what) in changed), default=None)
