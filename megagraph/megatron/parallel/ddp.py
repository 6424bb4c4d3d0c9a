# SPDX-License-Identifier: Apache-2.0
"""Megatron's DDP as a graph meets it: its hooks, finished gradients, parameters that are still gathered.

The additions to `main_grad` themselves are captured (csrc/bank/capture/main_grad_node.h).
"""

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megagraph.bank.bank import Bank
from megagraph.bank.sites import SiteSpec
from megagraph.megatron.seams import as_before, stand_in

__all__ = ["ParamSyncs", "accumulator_hooks", "borders_of", "find_ddp", "is_ddp_hook", "listen"]


def find_ddp(models: Sequence[nn.Module], chunk: nn.Module) -> nn.Module | None:
    """The Megatron DDP module around `chunk`, among what a schedule was given, or all; None without one."""
    # Hosts may call a model before any schedule has it.
    among = models or [it for it in gc.get_objects() if issubclass(type(it), nn.Module)]
    ddps = (model for model in among if "ddp_config" in vars(model))
    return next((ddp for ddp in ddps if any(module is chunk for module in ddp.modules())), None)


def is_ddp_hook(hook: Callable[..., Any]) -> bool:
    """Whether a module hook is Megatron DDP's own (it finishes parameter gathers)."""
    return getattr(hook, "__module__", "") == "megatron.core.distributed.distributed_data_parallel"


def _buckets(ddp: nn.Module | None, *options: str) -> Mapping[Tensor, Any]:
    """The group of buckets that each parameter is in; none if the DDP has none of these options on."""
    config: Any = getattr(ddp, "ddp_config", None)
    is_on = config is not None and any(getattr(config, option) for option in options)
    return getattr(ddp, "param_to_bucket_group", {}) if is_on else {}  # Megatron-FSDP has no groups


def accumulator_hooks(ddp: nn.Module | None) -> Callable[[nn.Parameter], int]:
    """How many hooks Megatron's DDP keeps on a parameter's accumulator; of a late gradient, on its module."""
    groups: Any = {} if ddp is None else ddp.param_to_bucket_group
    config: Any = getattr(ddp, "ddp_config", None)
    late = "skip_backward_post_hook" if getattr(config, "delay_wgrad_compute", False) else ""
    return lambda param: int(param in groups and not getattr(param, late, False))


def listen(bank: Bank, ddp: nn.Module | None) -> None:
    """Reports finished sites to the DDP's buckets, as its own hooks would; called after each capture.

    Only with `overlap_grad_reduce`, and in the last micro-batch of a step: in others nobody asks, so that the
    backward needs no GIL. There Python is entered if a bucket may be complete, and as each node ends. Each
    parameter is reported once, since DDP compares counts with those of its first step, and in the order of
    the backward and of what it leaves, as on a rank that runs eager.
    """
    group_of = _buckets(ddp, "overlap_grad_reduce")
    if ddp is None or not group_of:
        return
    ddp_ref: Any = weakref.ref(ddp)  # the graphs must not keep the model alive
    # By site, in its backward's order, as hashing is slow; also without a gradient, which eager's count has.
    late = [_late_gradients(spec) for spec in bank.specs]
    of_late = [[(group_of[param], param) for param in its if param in group_of] for its in late]
    at_once = [
        [(group_of[it], it) for it in dict.fromkeys(params) if it in group_of and it not in late[site]]
        for site, spec in enumerate(bank.specs)
        for params in ((*bank.gradient_order.get(site, ()), *spec.parameters()),)
    ]
    # By group the last site of it that the backward pass reaches.
    groups = {group: at for at in reversed(range(len(late))) for group, _it in (*at_once[at], *of_late[at])}

    def tell(of_sites: Sequence[Sequence[tuple[Any, Tensor]]], first: int, last: int = -1) -> None:
        force_all_reduce = ddp_ref().force_all_reduce
        for group, param in itertools.chain(*reversed(of_sites[first : max(first, last) + 1])):
            if param.requires_grad:
                group.register_grad_ready(param, force_all_reduce)

    bank.set_listener(
        lambda: any(group.is_last_microbatch for group in groups),
        functools.partial(tell, at_once),
        functools.partial(tell, of_late),
        sorted(set(groups.values())),
    )


def _late_gradients(spec: SiteSpec) -> Mapping[Tensor, None]:
    """Whose gradients a site makes behind its backward, in the order in which its layer asks for them."""
    if spec.finish is None:
        return {}
    marked = dict.fromkeys(it for it in spec.parameters() if getattr(it, "skip_backward_post_hook", False))
    late: dict[Tensor, None] = {}
    # A layer that asks in another way may find nothing to make: its order is that of its parameters.
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
        for module in spec.modules():
            if hasattr(module, "wgrad_store"):  # makes nothing now, but notes them
                own = dict.fromkeys(it for it in module.parameters(recurse=False) if it in marked)
                stack.enter_context(stand_in(module, backward_dw=functools.partial(late.update, own)))
        spec.finish(spec.module)
    return late | marked


def borders_of(ddp: nn.Module | None, sites: Sequence[SiteSpec]) -> set[int]:
    """Sites, by index, after whose backward a bucket of gradients is complete, or with which it is gathered.

    None if DDP neither reduces gradients in the backward pass nor gathers parameters in the forward pass.
    """
    group_of = _buckets(ddp, "overlap_grad_reduce", "overlap_param_gather")
    owned = [(param, index) for index, site in enumerate(sites) for param in site.parameters()]
    # The last one that is met is the first site of a group.
    return {*{group_of[param]: index for param, index in reversed(owned) if param in group_of}.values()}


class ParamSyncs:
    """Parameter all-gathers that overlap the forward pass, finished before the sites that need them.

    With `overlap_param_gather`, Megatron's DDP does this in a pre-hook of each submodule; a replayed
    site calls none.
    """

    def __init__(self, ddp: nn.Module | None, sites: Sequence[SiteSpec]) -> None:
        group_of = _buckets(ddp, "overlap_param_gather")
        self._ddp: Any = weakref.ref(ddp) if ddp is not None and group_of else None
        # In the order of registration, as Megatron's chain of gathers: a finished group starts the next.
        # None if nothing is gathered.
        self.groups = [
            [*dict.fromkeys(group_of[param] for param in site.parameters() if param in group_of)]
            for site in (sites if group_of else ())
        ]

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """While inside, parameters stay as they are: gathers have ended, and no layer begins one."""
        for group in itertools.chain(*self.groups):
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
        handles = self._ddp().remove_forward_pre_hook_handles if self.groups else {}
        with as_before(*(module._forward_pre_hooks for module in handles)):
            for module, handle in handles.items():
                del module._forward_pre_hooks[handle.id]
            yield

    def before_sites(self) -> Callable[[int], None] | None:
        """In each forward pass: what to call before a site, with its index, or None."""
        # Hosts take the pre-hooks away for a while, having synchronised the parameters: so here.
        if not self._ddp().remove_forward_pre_hook_handles:
            return None
        groups = itertools.chain(*self.groups)
        is_done = (it.param_gather_dispatched and it.param_gather_handle is None for it in groups)
        return None if all(is_done) else self._finish

    def _finish(self, index: int) -> None:
        ddp = self._ddp()
        skip_next = ddp.ddp_config.align_param_gather or ddp.overlap_param_gather_with_optimizer_step
        for group in self.groups[index]:
            group.finish_param_sync(skip_next_bucket_dispatch=skip_next)
