# SPDX-License-Identifier: Apache-2.0
"""Undoes what models that nobody uses any more leave behind.

Megatron keeps them in cycles that no garbage collector sees. Dispatchers of experts keep probabilities of
their last call with the history that autograd made, which leads to the hooks of DDP and through them to the
model; a part of the way lies in C++. So do layers, of a call that raised. The hooks of `overlap_param_gather`
are such a cycle, too. With a model its process groups stay, whose threads take up the machine.
"""

import gc
import weakref
from typing import Any

import objgraph

from megagraph.megatron.scopes.leftovers import drop_history, forget_calls

__all__ = ["free_models", "models_in_memory"]


_named: weakref.WeakSet[Any] = weakref.WeakSet()


def free_models() -> None:
    """Undoes these cycles in all models that there are. Call it where none of them is used again.

    Forgets the scale of routers' losses, too. A backward outside of any schedule makes one without
    dimensions, which no later schedule of this process could set.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    for found in gc.get_objects():
        _undo(found)
    del found  # the last one would stay
    gc.collect()


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


def _undo(found: object) -> None:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
    from megatron.core.transformer.transformer_layer import TransformerLayer

    kind = type(found)  # isinstance() asks proxies for theirs, which some of them refuse
    if issubclass(kind, MoETokenDispatcher):
        drop_history(found)
    elif issubclass(kind, TransformerLayer):
        forget_calls([found])
    elif issubclass(kind, DistributedDataParallel) and found.remove_forward_pre_hook_handles:
        found.disable_forward_pre_hook(param_sync=False)
