# SPDX-License-Identifier: Apache-2.0
"""Keeps what calls of sites write as it was, shows what they have made of it, and puts it back.

Gradients of parameters, and beside them buffers, further state and tensors in plain attributes.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.bits import Results, has_bits, have_same_bits
from megagraph.bank.restore import main_grad_of, written_by
from megagraph.bank.sites import SiteSpec

__all__ = ["KeptGradients", "KeptState"]

_FLAG = "grad_added_to_main_grad"


class KeptGradients:
    """Of all trainable parameters of a site.

    Args:
        site: whose parameters.
    """

    def __init__(self, site: SiteSpec) -> None:
        self._params = {name: param for name, param in site.named_parameters() if param.requires_grad}
        main_grads = {name: main_grad_of(param) for name, param in self._params.items()}
        self._main = {name: grad for name, grad in main_grads.items() if grad is not None}
        # Most often they are zero between two steps, and need no copy.
        self._before = {name: grad.clone() if has_bits(grad) else None for name, grad in self._main.items()}
        self._flags = [
            (param, getattr(param, _FLAG)) for param in self._params.values() if hasattr(param, _FLAG)
        ]

    def found(self, swap: _C.AccumulatorSwap | None = None) -> Results:
        """What is there, by what it is in words; in no memory of its own.

        Args:
            swap: the accumulators of the backward pass; None for autograd's own.
        """
        results = {f"gradient of {name}": grad for name, grad in self._main.items()}
        others = {name: param for name, param in self._params.items() if name not in self._main}
        kept = [param.grad for param in others.values()] if swap is None else swap.take_kept_grads()
        named = zip(others, kept, strict=True)
        return results | {f"gradient of {name}": grad for name, grad in named if grad is not None}

    @contextlib.contextmanager
    def put_back_afterwards(self) -> Iterator[None]:
        """Leaves everything as it was, whatever happens inside, where no parameter has a `.grad` at first."""
        grads: list[tuple[nn.Parameter, Tensor | None]] = [(p, p.grad) for p in self._params.values()]
        for param, _ in grads:
            param.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for name, main_grad in self._main.items():
                    before = self._before[name]
                    _ = main_grad.zero_() if before is None else main_grad.copy_(before)
            for param, grad in grads:
                param.grad = grad
            for param, flag in self._flags:
                _set_flag(param, flag)


def _set_flag(param: nn.Parameter, flag: Any) -> None:
    setattr(param, _FLAG, flag)


class KeptState:
    """What calls of sites write beside gradients.

    Args:
        sites: whose calls, by index.
        further: what they write that is put back at the end only, and never shown.
    """

    def __init__(self, sites: Sequence[SiteSpec], further: Sequence[Tensor]) -> None:
        written = [written_by(site) for site in sites]
        tensors = [*further, *(tensor for of_site in written for tensor in of_site.values())]
        # Aliases of one storage and version with what sites hold: some of it requires a gradient.
        live = {id(tensor): tensor.detach() for tensor in tensors}
        self._of_site = [{name: live[id(it)] for name, it in of_site.items()} for of_site in written]
        self._before = {id(tensor): (tensor, tensor.clone()) for tensor in live.values()}

    def found(self, index: int) -> Results:
        """What is there of a site, by what it is in words; in no memory of its own."""
        return dict(self._of_site[index])

    def changed(self, index: int) -> Results:
        """Copies of what differs from before."""
        found = self._of_site[index].items()
        return {name: now.clone() for name, now in found if not have_same_bits(now, self._was(now))}

    def with_unchanged(self, index: int, changed: Results) -> Results:
        """What `changed()` gave, and the rest of the site as it was before."""
        return {name: changed.get(name, self._was(tensor)) for name, tensor in self._of_site[index].items()}

    def _was(self, tensor: Tensor) -> Tensor:
        return self._before[id(tensor)][1]

    def put(self, index: int, changed: Mapping[str, Tensor] | None = None) -> None:
        """Puts a site back, or where it was when `changed()` gave this."""
        self._copy((tensor, self._was(tensor)) for tensor in self._of_site[index].values())
        if changed:
            self._copy((self._of_site[index][name], content) for name, content in changed.items())

    def put_all_back(self) -> None:
        """Puts everything back."""
        self._copy(self._before.values())

    @staticmethod
    @torch.no_grad()
    def _copy(contents: Iterable[tuple[Tensor, Tensor]]) -> None:
        for tensor, content in contents:
            # Autograd takes a new version for other content. A backward that has saved this tensor finds
            # what its forward has left, or what was there before.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor):
                tensor.copy_(content)
