# SPDX-License-Identifier: Apache-2.0
"""Undoes what models that nobody uses any more leave behind.

Megatron keeps them in cycles that no garbage collector sees. Dispatchers of experts keep probabilities of
their last call with the history that autograd made, which leads to the hooks of DDP and through them to the
model; a part of the way lies in C++. So do layers, of a call that raised. The hooks of `overlap_param_gather`
are such a cycle, too. With a model its process groups stay, whose threads take up the machine.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import objgraph
import torch

from megagraph.megatron.scopes.leftovers import drop_history, forget_calls

__all__ = ["free_models", "models_in_memory"]


_named: weakref.WeakSet[Any] = weakref.WeakSet()


def free_models() -> None:
    """Undoes these cycles in all models that there are. Call it where none of them is used again.

    Gives back the memory of a GPU that they had, which other processes may need. Forgets the scale of
    routers' losses, too: a backward outside of any schedule makes one without dimensions, which no later
    schedule of this process could set.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    _undo_all(gc.get_objects())
    gc.collect()
    torch.cuda.empty_cache()


def models_in_memory() -> list[str]:
    """The models that stay, and how each is reached: call it behind `uninstall()` and `free_models()`.

    Each is named once, to whoever asks first. What those free is Megatron's own, so that what keeps one is
    the plugin, or a test. C++ holds what is reached from no module.
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule

    models: list[Any] = [it for it in gc.get_objects() if issubclass(type(it), LanguageModule)]
    new = [model for model in models if model not in _named]
    _named.update(new)
    return [_path_to(model) for model in new]


def _path_to(model: object) -> str:
    path = objgraph.find_backref_chain(model, objgraph.is_proper_module, max_depth=30)
    return " -> ".join(getattr(it, "__name__", type(it).__name__) for it in path)


def _undo_all(objects: list[object]) -> None:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
    from megatron.core.transformer.transformer_layer import TransformerLayer

    undo: dict[type, Callable[[Any], None]] = {
        MoETokenDispatcher: drop_history,
        TransformerLayer: lambda layer: forget_calls([layer]),
        DistributedDataParallel: _undo_hooks,
    }
    of_type: dict[type, list[Callable[[Any], None]]] = {}
    for found in objects:
        kind = type(found)  # isinstance() asks proxies for theirs, which some of them refuse
        if kind not in of_type:
            of_type[kind] = [how for base, how in undo.items() if issubclass(kind, base)]
        for how in of_type[kind]:
            how(found)


def _undo_hooks(model: Any) -> None:
    if model.remove_forward_pre_hook_handles:
        model.disable_forward_pre_hook(param_sync=False)
