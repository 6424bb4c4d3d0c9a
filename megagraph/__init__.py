# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs for Megatron training on packed sequences: the same bits as eager, or a counted reason.

    import megagraph
    megagraph.install(megagraph.GraphConfig(...))

Importing it patches nothing and imports no Megatron. What is named here is the public interface;
docs/architecture.md says where the rest lives.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megagraph.bank.bank import Bank as Bank
    from megagraph.bank.sites import VariantSpec as VariantSpec
    from megagraph.config import GraphConfig as GraphConfig
    from megagraph.decide.dispatch import Capacity as Capacity
    from megagraph.decide.reasons import EagerReason as EagerReason
    from megagraph.megatron import disable_cuda_graphs_this_step as disable_cuda_graphs_this_step
    from megagraph.megatron import get_gpt_block_varlen_spec as get_gpt_block_varlen_spec
    from megagraph.megatron import get_gpt_layer_varlen_spec as get_gpt_layer_varlen_spec
    from megagraph.megatron import get_hybrid_stack_varlen_spec as get_hybrid_stack_varlen_spec
    from megagraph.megatron import install as install
    from megagraph.megatron import is_cuda_graph_skipped as is_cuda_graph_skipped
    from megagraph.megatron import reports as reports
    from megagraph.megatron import resume as resume
    from megagraph.megatron import suspend as suspend
    from megagraph.megatron import uninstall as uninstall

_HOME = {
    "Bank": "megagraph.bank.bank",
    "GraphConfig": "megagraph.config",
    "Capacity": "megagraph.decide.dispatch",
    "EagerReason": "megagraph.decide.reasons",
    "VariantSpec": "megagraph.bank.sites",
    "disable_cuda_graphs_this_step": "megagraph.megatron",
    "get_gpt_block_varlen_spec": "megagraph.megatron",
    "get_gpt_layer_varlen_spec": "megagraph.megatron",
    "get_hybrid_stack_varlen_spec": "megagraph.megatron",
    "install": "megagraph.megatron",
    "is_cuda_graph_skipped": "megagraph.megatron",
    "reports": "megagraph.megatron",
    "resume": "megagraph.megatron",
    "suspend": "megagraph.megatron",
    "uninstall": "megagraph.megatron",
}
__all__ = sorted(_HOME)


def _check_torch() -> None:
    """Says in one sentence what is wrong, where the compiled core could not even be loaded."""
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("megagraph needs PyTorch, and none is installed: install torch first") from None
    try:
        built: str = importlib.import_module("megagraph._build_info").TORCH_VERSION
    except ModuleNotFoundError:
        raise ImportError(
            "megagraph's core is not built: run `pip install --no-build-isolation .` in its folder"
        ) from None
    if built.split(".")[:2] != found.split(".")[:2]:
        raise ImportError(
            f"megagraph was built against torch {built}, and torch {found} is installed: reinstall it with "
            "`pip install --no-build-isolation --force-reinstall --no-deps .`"
        )


_check_torch()


def __getattr__(name: str) -> Any:
    """Finds a public name on its floor at first use, so that importing megagraph stays quick."""
    if name not in _HOME:
        raise AttributeError(f"module 'megagraph' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
