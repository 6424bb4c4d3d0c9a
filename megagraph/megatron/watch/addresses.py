# SPDX-License-Identifier: Apache-2.0
"""Notices that the memory which graphs read has moved or is gone: parameters, buffers, main gradients.

Looks only; what follows from it is decided elsewhere.
"""

from collections.abc import Sequence

from torch import Tensor

from megagraph import _C
from megagraph.bank.sites import SiteSpec
from megagraph.decide.reasons import EagerReason

__all__ = ["MemoryWatch"]


class MemoryWatch:
    """Where the parameters and buffers of some sites and their main gradients lie.

    Main gradients count only once graphs read them: hosts free them outside of training, and graphs
    without a backward pass go on.

    Args:
        specs: the sites.
    """

    def __init__(self, specs: Sequence[SiteSpec]) -> None:
        self._specs = specs
        # Hashes of what graphs read: of the addresses, and of what requires a gradient.
        self._read: tuple[int, int] | None = None
        self._grads: int | None = None
        # Graphs read main gradients that have no memory now.
        self.are_gradients_away = False

    @property
    def is_watching(self) -> bool:
        """Whether `watch()` was called."""
        return self._read is not None

    def _parameters(self) -> list[Tensor]:
        return [param for spec in self._specs for param in spec.module.parameters()]

    def _read_by_graphs(self) -> list[Tensor]:
        buffers = [buffer for spec in self._specs for buffer in spec.module.buffers()]
        return [*self._parameters(), *buffers]

    def _main_grads(self) -> list[Tensor]:
        grads = (getattr(param, "main_grad", None) for param in self._parameters())
        return [grad for grad in grads if grad is not None]

    def watch(self, *, grad: bool) -> None:
        """Remembers where everything lies now.

        Args:
            grad: graphs read main gradients too.
        """
        self._read = _C.fingerprint(self._read_by_graphs())
        if grad:
            self._grads, _flags = _C.fingerprint(self._main_grads())

    def is_there(self, *, grad: bool) -> bool:
        """Whether everything has memory, so that it can be captured.

        Args:
            grad: main gradients too.
        """
        tensors = [*self._parameters(), *(self._main_grads() if grad else ())]
        return all(tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0 for tensor in tensors)

    def what_changed(self) -> EagerReason | None:
        """Why the graphs must not be replayed any more, or None: moved addresses, other trainables."""
        if self._read is None:
            return None
        addresses, flags = _C.fingerprint(self._read_by_graphs())
        if addresses != self._read[0] or self._have_gradients_moved():
            return EagerReason.ADDRESS_MOVED
        return None if flags == self._read[1] else EagerReason.PARAMETERS_CHANGED

    def _have_gradients_moved(self) -> bool:
        """Whether main gradients lie elsewhere; while they have no memory, nobody can tell."""
        self.are_gradients_away = False
        if self._grads is None or self._grads == _C.fingerprint(self._main_grads())[0]:
            return False
        self.are_gradients_away = not self.is_there(grad=True)
        return not self.are_gradients_away
