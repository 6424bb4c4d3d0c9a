# SPDX-License-Identifier: Apache-2.0
"""Megatron's DDP as a graph meets it: which hooks are its own, and who is told of finished gradients.

The additions to `main_grad` themselves are captured (csrc/bank/main_grad_node.h).
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from megagraph import _C

__all__ = ["find_ddp", "hooks_per_parameter", "is_ddp_hook", "listen"]


def find_ddp(models: Sequence[nn.Module], chunk: nn.Module) -> nn.Module | None:
    """The Megatron DDP module around `chunk`, among what a schedule was given; None without one."""
    for model in models:
        if hasattr(model, "ddp_config") and any(module is chunk for module in model.modules()):
            return model
    return None


def is_ddp_hook(hook: Callable[..., Any]) -> bool:
    """Whether a module hook is Megatron DDP's own (it finishes parameter gathers)."""
    return getattr(hook, "__module__", "") == "megatron.core.distributed.distributed_data_parallel"


def hooks_per_parameter(ddp: nn.Module | None) -> int:
    """Hooks that Megatron's DDP keeps on each parameter's gradient accumulator."""
    return 0 if ddp is None else 1


def listen(chunk: _C.Chunk, ddp: nn.Module | None, layers: Sequence[nn.Module]) -> None:
    """Reports each finished site to the DDP's buckets, as its own hooks would.

    Only with `overlap_grad_reduce`, and only in the last micro-batch of a step: in others nobody
    asks, so that the backward pass needs no GIL. Each parameter is reported once, since DDP compares
    counts with those of its first step.
    """
    ddp_config: Any = getattr(ddp, "ddp_config", None)
    if ddp is None or not ddp_config.overlap_grad_reduce:
        return
    groups: Any = ddp.param_to_bucket_group
    ddp_ref = weakref.ref(ddp)  # the graphs must not keep the model alive
    params = [[p for p in layer.parameters() if p.requires_grad and p in groups] for layer in layers]

    def wants() -> bool:
        return any(groups[param].is_last_microbatch for site in params for param in site[:1])

    def done(rank: int) -> None:
        module: Any = ddp_ref()
        for param in params[rank]:
            groups[param].register_grad_ready(param, module.force_all_reduce)

    chunk.set_listener(wants, done)
