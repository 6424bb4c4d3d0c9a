# SPDX-License-Identifier: Apache-2.0
"""Puts back what a warm-up or a capture touches: gradients, flags, buffers, attributes, torch's settings."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.bank.attributes import PlainAttributes, plain_tensors
from megagraph.bank.sites import SiteSpec

__all__ = ["leaves_no_trace", "main_grad_of", "unfilled", "written_by"]


def main_grad_of(param: Tensor) -> Tensor | None:
    """Where Megatron's DDP accumulates a parameter's gradient; None without it."""
    return getattr(param, "main_grad", None)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def _is_writable(tensor: Tensor) -> bool:
    """Whether a call may change a tensor in place: a plain one, whose entries share no memory."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta:
        return False
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    overlaps = any(stride == 0 and size > 1 for stride, size in steps)
    return _has_memory(tensor) and not overlaps and not tensor.is_inference()


def written_by(site: SiteSpec) -> dict[str, Tensor]:
    """What a site's calls may change in place beside gradients, each once, by what it is in words."""
    found = {
        **{f"buffer {name}": buffer for name, buffer in site.named_buffers()},
        **{f"further state {number}": state for number, state in enumerate(site.further_state())},
        **{f"attribute {it}": held for it, held in plain_tensors([*site.named_modules()]).items()},
    }
    named = {name: tensor for name, tensor in found.items() if _is_writable(tensor)}
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: tensor for name, tensor in named.items() if first[id(tensor)] == name}


@contextlib.contextmanager
def leaves_no_trace(
    sites: Sequence[SiteSpec], *, work_runs: bool, left_out: Collection[str] = ()
) -> Iterator[None]:
    """Puts back gradients, flags, buffers and attributes of the sites' modules, whatever happens inside.

    Args:
        sites: owners of the modules.
        work_runs: the work inside really runs, so that contents change too.
        left_out: names of attributes that may have other values afterwards.

    Raises:
        ValueError: where a buffer is another one afterwards, or an attribute has another value: Note
            [Plain attributes].
    """
    params = [param for site in sites for param in site.trainable()]
    saved: list[tuple[Tensor, Tensor]] = []
    if work_runs:
        grads_of = (main_grad_of(param) for param in params)
        # Hosts free gradients outside of training; work without a backward pass does not touch them.
        saved += [(grad, grad.clone()) for grad in grads_of if grad is not None and _has_memory(grad)]
        saved += [(it, it.detach().clone()) for site in sites for it in written_by(site).values()]
    attributes = PlainAttributes([named for site in sites for named in site.named_modules()])
    tables = [(module._buffers, dict(module._buffers)) for site in sites for module in site.modules()]
    grads = [(param, param.grad) for param in params]
    flag = "grad_added_to_main_grad"
    flags = [(param, getattr(param, flag)) for param in params if hasattr(param, flag)]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, content in saved:
                tensor.copy_(content)
        for param, grad in grads:
            param.grad = grad
        for param, value in flags:
            setattr(param, flag, value)
        rebound = any(
            table.get(name) is not buffer for table, before in tables for name, buffer in before.items()
        )
        for table, before in tables:
            table.update(before)
        changed_attribute = attributes.put_back(left_out)
    if rebound:
        raise ValueError("a buffer was reassigned; graphs update buffers in place only")
    if changed_attribute is not None:
        raise ValueError(changed_attribute)


@contextlib.contextmanager
def unfilled() -> Iterator[None]:
    """Lets `torch.empty` leave memory as it is in deterministic mode, too.

    A static buffer is written before its graph is launched: a captured fill would overwrite it.
    """
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filled
