# SPDX-License-Identifier: Apache-2.0
"""Megatron's DDP as a graph meets it: its hooks, finished gradients, parameters that are still gathered.

The additions to `main_grad` themselves are captured (csrc/bank/capture/main_grad_node.h).
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from megagraph.bank.chain import Chain

__all__ = ["ParamSyncs", "accumulator_hooks", "find_ddp", "is_ddp_hook", "listen"]


def find_ddp(models: Sequence[nn.Module], chunk: nn.Module) -> nn.Module | None:
    """The Megatron DDP module around `chunk`, among what a schedule was given; None without one."""
    for model in models:
        if hasattr(model, "ddp_config") and any(module is chunk for module in model.modules()):
            return model
    return None


def _is_megatrons(function: Callable[..., Any], module: str) -> bool:
    return getattr(function, "__module__", "") == f"megatron.core.distributed.{module}"


def is_ddp_hook(hook: Callable[..., Any]) -> bool:
    """Whether a module hook is Megatron DDP's own (it finishes parameter gathers)."""
    return _is_megatrons(hook, "distributed_data_parallel")


def accumulator_hooks(ddp: nn.Module | None) -> Callable[[nn.Parameter], int]:
    """How many hooks Megatron's DDP keeps on the gradient accumulator of a parameter."""
    groups: Any = {} if ddp is None else ddp.param_to_bucket_group
    return lambda param: int(param in groups)


class _Ready(NamedTuple):
    """Parameters of one bucket group that are finished together.

    Args:
        group: Megatron's bucket group.
        params: in the order in which the backward pass reaches them.
        counts: how often each is counted now, once, but for the last one.
    """

    group: Any
    params: Sequence[Tensor]
    counts: Mapping[Tensor, int]


def listen(chain: Chain, ddp: nn.Module | None, layers: Sequence[nn.Module]) -> None:
    """Reports finished sites to the DDP's buckets, as its own hooks would; called after each capture.

    Only with `overlap_grad_reduce`, and only in the last micro-batch of a step: in others nobody
    asks, so that the backward pass needs no GIL. There Python is entered where a bucket may be complete,
    and at the end of each autograd node. Each parameter is reported once, since DDP compares counts with
    those of its first step, and in the order in which the backward pass reached them: buckets that are
    complete are reduced, and a rank that runs eager beside this one reduces them in that order.
    """
    ddp_config: Any = getattr(ddp, "ddp_config", None)
    if ddp is None or not ddp_config.overlap_grad_reduce:
        return
    group_of: Any = ddp.param_to_bucket_group
    ddp_ref = weakref.ref(ddp)  # the graphs must not keep the model alive
    # Of each site. A parameter without a gradient is reported too, as eager's count would miss it for ever.
    params = [
        [
            param
            for param in dict.fromkeys((*chain.gradient_order.get(index, ()), *layer.parameters()))
            if param.requires_grad and param in group_of
        ]
        for index, layer in enumerate(layers)
    ]
    # By group the last site of it that the backward pass reaches.
    groups = {group_of[param]: index for index in reversed(range(len(params))) for param in params[index]}

    @functools.cache
    def ready(first: int, last: int) -> Sequence[_Ready]:
        found: dict[Any, list[Tensor]] = {}
        for param in (param for index in range(last, first - 1, -1) for param in params[index]):
            of_group = found.pop(group_of[param], [])
            found[group_of[param]] = [*of_group, param]  # groups in the order of their last parameters
        return [_Ready(group, of, dict.fromkeys(of[:-1], 1)) for group, of in found.items()]

    def wants() -> bool:
        return any(group.is_last_microbatch for group in groups)

    def done(first: int, last: int) -> None:
        module: Any = ddp_ref()
        for of_group in ready(first, last):
            _register(of_group, module.force_all_reduce)

    chain.listen(wants, done, sorted(set(groups.values())))


def _register(ready: _Ready, force_all_reduce: bool) -> None:
    """Tells a bucket group that gradients are there.

    Megatron takes a microsecond for each, most of it for hashes of tensors, and can find a group complete at
    the last one only. So what comes before that is counted in one go, where the group counts as Megatron's
    do and nothing is counted yet: without `no_sync` each micro-batch of a step adds to the counts.
    """
    group, params, counts = ready
    if group.is_last_microbatch and _is_megatrons(group.register_grad_ready, "param_and_grad_buffer"):
        counted = getattr(group, "per_param_grad_ready_counts", None)
        # A merge of dictionaries hashes nothing.
        if isinstance(counted, dict) and len({**counted, **counts}) == len(counted) + len(counts):
            counted.update(counts)
            params = params[-1:]
    for param in params:
        group.register_grad_ready(param, force_all_reduce)


class ParamSyncs:
    """Parameter all-gathers that overlap the forward pass, finished before the layers that need them.

    With `overlap_param_gather`, Megatron's DDP does this in a pre-hook of each submodule; a replayed
    layer calls none.

    Args:
        ddp: Megatron's DDP, or None.
        layers: in execution order.
    """

    def __init__(self, ddp: nn.Module | None, layers: Sequence[nn.Module]) -> None:
        self._groups: list[list[Any]] | None = None
        ddp_config: Any = getattr(ddp, "ddp_config", None)
        group_of: Any = getattr(ddp, "param_to_bucket_group", None)  # Megatron-FSDP, refused, has none
        if ddp is None or group_of is None or not ddp_config.overlap_param_gather:
            return
        self._ddp = weakref.ref(ddp)
        self._groups = []
        for layer in layers:
            # In the order of registration, as Megatron's chain of gathers: a finished group starts the next.
            of_layer = {id(group_of[p]): group_of[p] for p in layer.parameters() if p in group_of}
            self._groups.append(list(of_layer.values()))

    def before_layers(self) -> Callable[[int], None] | None:
        """What to call with each layer's index before it runs in this forward pass; None for nothing."""
        if self._groups is None:
            return None
        ddp: Any = self._ddp()
        # Hosts take the pre-hooks away for a while, having synchronised the parameters: so here.
        if not ddp.remove_forward_pre_hook_handles:
            return None
        is_done = [
            group.param_gather_dispatched and group.param_gather_handle is None for group in self._all()
        ]
        return None if all(is_done) else self._finish

    def _all(self) -> list[Any]:
        assert self._groups is not None
        return [group for of_layer in self._groups for group in of_layer]

    def _finish(self, index: int) -> None:
        assert self._groups is not None
        ddp: Any = self._ddp()
        skip_next = ddp.ddp_config.align_param_gather or ddp.overlap_param_gather_with_optimizer_step
        for group in self._groups[index]:
            group.finish_param_sync(skip_next_bucket_dispatch=skip_next)
