# SPDX-License-Identifier: Apache-2.0
"""What every test is watched for: each graph that it uses is compared with its module or named, and its
models go. For that, what models that nobody uses any more leave behind is undone. Megatron keeps them in
cycles that no garbage collector sees. Dispatchers of experts keep probabilities of their last call with the
history that autograd made, which leads to the hooks of DDP and through them to the model; a part of the way
lies in C++. So do layers, of a call that raised. The hooks of `overlap_param_gather` are such a cycle, too.
With a model its process groups stay, whose threads take up the machine."""

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import objgraph
import torch

from megagraph.bank.bank import Bank
from megagraph.bank.sites import CapturedVariant
from megagraph.bank.verify import Verification
from megagraph.megatron.graphs.model import GraphedModel
from megagraph.megatron.scopes.moe import drop_history, forget_calls

PATIENCE_SECONDS = 5

_named: weakref.WeakSet[Any] = weakref.WeakSet()
_named_pools: set[tuple[int, ...]] = set()


def forget_loss_scale() -> None:
    """Of routers' losses: a backward outside of any schedule makes one that no later schedule could set."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def free_models() -> None:
    """Undoes these cycles in all models, of which none may be used again, and gives back a GPU's memory."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
    from megatron.core.transformer.transformer_layer import TransformerLayer

    forget_loss_scale()
    for found in gc.get_objects():
        kind = type(found)  # isinstance() asks proxies for theirs, which some of them refuse
        if issubclass(kind, MoETokenDispatcher):
            drop_history(found)
        elif issubclass(kind, TransformerLayer):
            forget_calls([found])
        elif issubclass(kind, DistributedDataParallel) and found.remove_forward_pre_hook_handles:
            found.disable_forward_pre_hook(param_sync=False)
    gc.collect()
    torch.cuda.empty_cache()


def go_in_time(are_gone: Callable[[], bool]) -> bool:
    """Whether what nobody holds any more goes, if not at once. A communicator's thread lets go of a tensor's
    history a moment after the call. A cycle that only another one held, in C++, is garbage after that one."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (gone := are_gone()) and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    return gone


def models_in_memory() -> list[str]:
    """What stays of models, of their graphs and of the memory of these behind `uninstall()` and
    `free_models()`, and how it is reached: by the plugin or a test, or by C++ if from no module. Each is
    named once, to whoever asks first."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    kinds = LanguageModule, GraphedModel, Bank

    def unnamed() -> list[Any]:
        return [it for it in gc.get_objects() if issubclass(type(it), kinds) and it not in _named]

    go_in_time(lambda: not unnamed())
    new = unnamed()
    _named.update(new)
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_initialized() else []
    pools = {tuple(segment["segment_pool_id"]) for segment in segments} - {(0, 0)} - _named_pools
    _named_pools.update(pools)
    return [*(_path_to(it) for it in new), *(f"the pool {pool} of graphs" for pool in sorted(pools))]


def _path_to(found: object) -> str:
    path = objgraph.find_backref_chain(found, objgraph.is_proper_module, max_depth=30)
    return " -> ".join(getattr(it, "__name__", type(it).__name__) for it in path)


# -- graphs ----------------------------------------------------------------------------------------


def _compared(captured: CapturedVariant) -> set[int]:
    """The sites, by index, whose graphs of a variant have been compared."""
    return vars(captured).setdefault("compared", set())


@contextlib.contextmanager
def every_graph_is_compared_or_named() -> Iterator[None]:
    """Inside, a report raises `AssertionError` for any other graph, but where verification is off, and for
    calls that neither replayed nor ran eager. What was compared is noted where that happens."""
    compare, report = Verification._compare, GraphedModel.report

    def noting(verification: Verification, flight: Any, *args: Any) -> None:
        compare(verification, flight, *args)
        _compared(verification._variant).add(flight.index)

    def checking(graphs: GraphedModel) -> dict[str, Any]:
        found, bank = report(graphs), graphs.captures.bank
        assert found["calls"] == found["replays"] + sum(found["eager"].values())
        named = {(it["variant"], it["site"]) for it in found["verification"]["unverified_sites"]}
        missing = [
            (str(captured.spec), site.name)
            for captured in bank.captured.values()
            for index, site in bank.graphable().items()
            if index not in _compared(captured) and (str(captured.spec), site.name) not in named
        ]
        assert graphs._config.verify == "off" or not missing, f"neither compared nor named: {missing}"
        return found

    patched = mock.patch.object
    with patched(Verification, "_compare", noting), patched(GraphedModel, "report", checking):
        yield
