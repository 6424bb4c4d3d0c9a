# SPDX-License-Identifier: Apache-2.0
"""Frees models that nobody uses any more and that Megatron keeps in cycles no garbage collector sees.

Dispatchers of experts keep probabilities of their last call with the history that autograd made, which leads
to the hooks of DDP and through them to the model; a part of the way lies in C++. The hooks of
`overlap_param_gather` are such a cycle, too. With a model its process groups stay, whose threads take up the
machine.
"""

import gc

from torch import Tensor

__all__ = ["free_models"]


def free_models() -> None:
    """Undoes these cycles in all models that there are. Call it where none of them is used again."""
    for found in gc.get_objects():
        _undo(found)
    del found  # the last one would stay
    gc.collect()


def _undo(found: object) -> None:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    kind = type(found)  # isinstance() asks proxies for theirs, which some of them refuse
    if issubclass(kind, MoETokenDispatcher):
        attributes = vars(found).items()
        for name in [name for name, value in attributes if isinstance(value, Tensor) and value.grad_fn]:
            setattr(found, name, None)
    elif issubclass(kind, DistributedDataParallel) and found.remove_forward_pre_hook_handles:
        found.disable_forward_pre_hook(param_sync=False)
