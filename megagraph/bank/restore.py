# SPDX-License-Identifier: Apache-2.0
"""What calls of sites write beside their outputs: finds it, keeps it as it was, compares it, puts it back.

That is gradients, buffers, further state, values in plain attributes, flags and torch's settings.

csrc/watch/plain_attributes.h, Note [Plain attributes], says what becomes of attributes, and of which.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megagraph import _C
from megagraph._C import KeptState, PlainAttributes, plain_tensors
from megagraph.bank.sites import SiteSpec

__all__ = ["KeptGradients", "Results", "leaves_no_trace", "main_grad_of", "written_by"]

Results = dict[str, Tensor]  # of one run, by what they are in words


def main_grad_of(param: Tensor) -> Tensor | None:
    """Where Megatron's DDP accumulates a parameter's gradient; None without it."""
    return getattr(param, "main_grad", None)


def written_by(site: SiteSpec) -> dict[str, Tensor]:
    """What a site's calls may change in place beside gradients, by what it is in words."""
    return {
        **{f"buffer {name}": buffer for name, buffer in site.named_buffers()},
        **{f"further state {number}": state for number, state in enumerate(site.state(site.module))},
        **{f"attribute {it}": held for it, held in plain_tensors([*site.named_modules()]).items()},
    }


@contextlib.contextmanager
def leaves_no_trace(
    sites: Sequence[SiteSpec], *, work_runs: bool, left_out: Collection[str] | None = None
) -> Iterator[None]:
    """Puts back gradients, flags, buffers and attributes of the sites' modules, whatever happens inside.

    Where `work_runs`, contents change too. A `ValueError` afterwards: a buffer that is another one, what was
    given other memory, and an attribute that has another value and is not left out. By default the caller
    keeps attributes.
    """
    gradients = KeptGradients(sites, work_runs)
    named = ((site.within(name), param) for site in sites for name, param in site.named_parameters())
    params = {f"parameter {name}": param for name, param in named}
    state = KeptState([written_by(site) for site in sites if work_runs], placed=params)
    owners = [named for site in sites for named in site.named_modules()]
    attributes = PlainAttributes(() if left_out is None else owners, left_out or ())
    tables = [(module._buffers, dict(module._buffers)) for _name, module in owners]
    try:
        with gradients.put_back_afterwards():
            yield
    finally:
        moved = state.put_all_back()
        rebound = any(table.get(name) is not it for table, before in tables for name, it in before.items())
        for table, before in tables:
            table.update(before)
        changed_attribute = attributes.put_back()
    if rebound:
        raise ValueError("a buffer was reassigned; graphs update buffers in place only")
    if moved:
        raise ValueError(f"{moved} was given other memory; graphs write in place only")
    if changed_attribute is not None:
        raise ValueError(changed_attribute)


_FLAG = "grad_added_to_main_grad"


class KeptGradients:
    """Of all trainable parameters of some sites, with the flags of fused accumulation.

    Only where `work_runs` may main gradients change, too. What is still to be made afterwards never will be.
    """

    def __init__(self, sites: Sequence[SiteSpec], work_runs: bool = True) -> None:
        self._forget = [partial(site.forget, site.module) for site in sites]
        self._params = [named for site in sites for named in site.trainable()]
        main_grads = (main_grad_of(param) for _name, param in self._params if work_runs)
        # Hosts free them outside of training; work without a backward pass does not touch them. Most often
        # they are zero between two steps, and need no copy.
        self._before = [
            (grad, grad.clone() if _C.has_bits(grad) else None)
            for grad in main_grads
            if grad is not None and grad.untyped_storage().nbytes() > 0
        ]
        self._flags = [(param, getattr(param, _FLAG)) for _, param in self._params if hasattr(param, _FLAG)]

    def found(self, swap: _C.AccumulatorSwap | None = None) -> Results:
        """What autograd's accumulators, or those of a swap, have left, in no memory of its own."""
        names: dict[Tensor, str] = {param: name for name, param in self._params}
        found = [(param, main_grad_of(param)) for param in names]
        others = [(param, param.grad) for param, grad in found if grad is None]
        found += others if swap is None else [*swap.take_kept_grads()]
        return {f"gradient of {names[param]}": grad for param, grad in found if grad is not None}

    @contextlib.contextmanager
    def put_back_afterwards(self) -> Iterator[None]:
        """Leaves everything as it was, whatever happens inside, where no parameter has a `.grad` at first."""
        grads = [(param, param.grad) for _name, param in self._params]
        for param, _grad in grads:
            param.grad = None
        try:
            yield
        finally:
            for forget in self._forget:
                forget()
            with torch.no_grad():
                for main_grad, before in self._before:
                    _ = main_grad.zero_() if before is None else main_grad.copy_(before)
            for param, grad in grads:
                param.grad = grad
            for param, flag in self._flags:
                setattr(param, _FLAG, flag)
