# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs for Megatron training on packed sequences: the same bits as eager, or a counted reason.

    import megagraph
    megagraph.install(megagraph.GraphConfig(...))

Importing it patches nothing and imports no Megatron. What is named here is the public interface;
docs/architecture.md says where the rest lives.
"""

import importlib
import importlib.metadata
import importlib.util
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megagraph.config import Capacity as Capacity
    from megagraph.config import GraphConfig as GraphConfig
    from megagraph.megatron.parallel.context import context_groups as context_groups
    from megagraph.megatron.patch.installation import install as install
    from megagraph.megatron.patch.installation import reports as reports
    from megagraph.megatron.patch.installation import resume as resume
    from megagraph.megatron.patch.installation import suspend as suspend
    from megagraph.megatron.patch.installation import uninstall as uninstall
    from megagraph.megatron.plugin import disable_cuda_graphs_this_step as disable_cuda_graphs_this_step
    from megagraph.megatron.plugin import is_cuda_graph_skipped as is_cuda_graph_skipped
    from megagraph.megatron.specs import get_gpt_block_varlen_spec as get_gpt_block_varlen_spec
    from megagraph.megatron.specs import get_gpt_layer_varlen_spec as get_gpt_layer_varlen_spec
    from megagraph.megatron.specs import get_hybrid_stack_varlen_spec as get_hybrid_stack_varlen_spec
    from megagraph.megatron.specs import with_grouped_experts as with_grouped_experts
    from megagraph.megatron.watch import watch as watch
    from megagraph.reasons import EagerReason as EagerReason

    __version__: str

_NAMES = {
    "megagraph.config": ("Capacity", "GraphConfig"),
    "megagraph.reasons": ("EagerReason",),
    "megagraph.megatron.parallel.context": ("context_groups",),
    "megagraph.megatron.patch.installation": ("install", "reports", "resume", "suspend", "uninstall"),
    "megagraph.megatron.plugin": ("disable_cuda_graphs_this_step", "is_cuda_graph_skipped"),
    "megagraph.megatron.specs": (
        *("get_gpt_block_varlen_spec", "get_gpt_layer_varlen_spec", "get_hybrid_stack_varlen_spec"),
        "with_grouped_experts",
    ),
    "megagraph.megatron.watch": ("watch",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *sorted(_HOME)]


_REINSTALL = "reinstall it with `pip install --no-build-isolation --force-reinstall --no-deps .`"


def _check_torch() -> None:
    """Says in one sentence what is wrong if the compiled core could not even be loaded."""
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("megagraph needs PyTorch, and none is installed: install torch first") from None
    try:
        core = importlib.import_module("megagraph._build_info")
    except ModuleNotFoundError:
        raise ImportError(
            "megagraph's core has not been compiled: run `pip install --no-build-isolation .` in its folder"
        ) from None
    built: str = core.TORCH_VERSION
    # The whole release: the core knows the layout of objects that no release promises to keep.
    if built.split("+")[0] != found.split("+")[0]:
        raise ImportError(
            f"megagraph was built against torch {built}, and torch {found} is installed: {_REINSTALL}"
        )
    if core.CUDA_VERSION is None:
        return
    cuda = _cuda_of_torch()
    if cuda is None or cuda.split(".")[0] != core.CUDA_VERSION.split(".")[0]:
        raise ImportError(
            f"megagraph was built for CUDA {core.CUDA_VERSION}, and the installed torch {found} is "
            f"{'without CUDA' if cuda is None else f'for CUDA {cuda}'}: {_REINSTALL}"
        )


def _cuda_of_torch() -> str | None:
    """The CUDA version of the installed torch, without importing it; None where it has none."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    cuda: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    return cuda


_check_torch()


def __getattr__(name: str) -> Any:
    """Finds a public name on its floor at first use, so that importing megagraph stays quick."""
    if name == "__version__":
        return importlib.import_module("megagraph._build_info").VERSION
    if name not in _HOME:
        raise AttributeError(f"module 'megagraph' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names, and those that every module has."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
