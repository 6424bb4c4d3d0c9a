# SPDX-License-Identifier: Apache-2.0
"""Watches the addresses that graphs read: of parameters, buffers and main gradients.

Looks only; what follows from it is decided elsewhere.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.sites import SiteSpec
from megagraph.decide.reasons import EagerReason

__all__ = ["AddressWatch"]

# YaRN's cosines, which a longer pack replaces. Graphs read tables of their own (graphs/latent_tables.py).
_UNREAD = ("cos_cached", "sin_cached")


class AddressWatch:
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
        # What graphs write that no module owns, by identity, and its address. Held, so that nobody else gets
        # the memory while graphs may write there.
        self._state: dict[int, tuple[Tensor, int]] = {}
        # Scopes name the same tensors for all of their sites.
        self._with_state = [*{spec.state: spec for spec in specs}.values()]
        self.holds_state = False  # there is any
        # What the last look found: why graphs must not be replayed, and whether main gradients that they
        # read have no memory now.
        self.change: EagerReason | None = None
        self.are_gradients_away = False
        self.is_of_gradients_alone = False  # the change: graphs without a backward pass may go on

    def _parameters(self) -> list[Tensor]:
        return [param for spec in self._specs for param in spec.parameters()]

    def _modules(self) -> list[nn.Module]:
        return [module for spec in self._specs for module in spec.modules()]

    def _read_by_graphs(self) -> list[Tensor]:
        state = {id(tensor) for spec in self._with_state for tensor in spec.further_state()}
        unread = {id(getattr(module, name, None)) for module in self._modules() for name in _UNREAD}
        others = state | unread
        buffers = [buffer for spec in self._specs for buffer in spec.buffers() if id(buffer) not in others]
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
        self._state = self._state_of_now()
        self.holds_state = bool(self._state)
        if grad:
            self._grads, _flags = _C.fingerprint(self._main_grads())

    def _state_of_now(self) -> dict[int, tuple[Tensor, int]]:
        tensors = (tensor for spec in self._with_state for tensor in spec.further_state())
        return {id(tensor): (tensor, tensor.data_ptr()) for tensor in tensors}

    def has_other_state(self) -> bool:
        """Whether a tensor that graphs write, and no module owns, is another one; further ones may come."""
        now = self._state_of_now()
        return any(
            key not in now or now[key][1] != address for key, (_tensor, address) in self._state.items()
        )

    def forget_gradients(self) -> None:
        """No graph reads main gradients any more."""
        self._grads = None

    def has_memory(self, *, grad: bool) -> bool:
        """Whether everything has memory, so that it can be captured.

        Args:
            grad: main gradients too.
        """
        tensors = [*self._parameters(), *(self._main_grads() if grad else ())]
        return all(tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0 for tensor in tensors)

    def look(self) -> None:
        """Compares everything with what it was: see `change` and what stands beside it.

        While main gradients have no memory, nobody can tell whether they have moved.
        """
        if self._read is None:
            return
        addresses, flags = _C.fingerprint(self._read_by_graphs())
        grads = self._grads
        differ = grads is not None and grads != _C.fingerprint(self._main_grads())[0]
        self.are_gradients_away = differ and not self.has_memory(grad=True)
        self.is_of_gradients_alone = False
        if addresses != self._read[0] or self.has_other_state():
            self.change = EagerReason.ADDRESS_MOVED
        elif flags != self._read[1]:
            self.change = EagerReason.PARAMETERS_CHANGED
        else:
            self.is_of_gradients_alone = differ and not self.are_gradients_away
            self.change = EagerReason.ADDRESS_MOVED if self.is_of_gradients_alone else None
