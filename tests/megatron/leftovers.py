# SPDX-License-Identifier: Apache-2.0
"""Undoes what models that nobody uses any more leave behind.

Megatron keeps them in cycles that no garbage collector sees. Dispatchers of experts keep probabilities of
their last call with the history that autograd made, which leads to the hooks of DDP and through them to the
model; a part of the way lies in C++. The hooks of `overlap_param_gather` are such a cycle, too. With a model
its process groups stay, whose threads take up the machine.
"""

import gc

import objgraph

from megagraph.megatron.scopes.leftovers import drop_history

__all__ = ["free_models", "models_in_memory"]


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
    """The models that are still there, and how each is reached: behind `uninstall()` and `free_models()`.

    What those free is Megatron's own, so that whatever keeps one is the plugin, or a test. C++ holds what is
    reached from no module.
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule

    models = [found for found in gc.get_objects() if issubclass(type(found), LanguageModule)]
    return [_path_to(model) for model in models]


def _path_to(model: object) -> str:
    path = objgraph.find_backref_chain(model, objgraph.is_proper_module, max_depth=30)
    return " -> ".join(getattr(it, "__name__", type(it).__name__) for it in path)


def _undo(found: object) -> None:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    kind = type(found)  # isinstance() asks proxies for theirs, which some of them refuse
    if issubclass(kind, MoETokenDispatcher):
        drop_history(found)
    elif issubclass(kind, DistributedDataParallel) and found.remove_forward_pre_hook_handles:
        found.disable_forward_pre_hook(param_sync=False)
