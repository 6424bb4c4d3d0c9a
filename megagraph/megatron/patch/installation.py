# SPDX-License-Identifier: Apache-2.0
"""Puts the plugin into megatron-core and takes it out again. Nothing is patched at import."""

import atexit
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from megagraph import _C
from megagraph.config import GraphConfig
from megagraph.megatron import seams
from megagraph.megatron.patch.forwards import ForwardWrappers
from megagraph.megatron.patch.rope import wrap_rope
from megagraph.megatron.plugin import Plugin
from megagraph.megatron.progress import capture_progress
from megagraph.report import write_report

__all__ = ["install", "installed_plugin", "reports", "resume", "suspend", "uninstall"]

_log = logging.getLogger("megagraph")


class _Installation:
    """The plugin and the functions that it took the place of."""

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        self._config = plugin.config
        self._originals: list[tuple[seams.Seam, Any]] = []
        wrappers = ForwardWrappers(plugin)
        for schedule in seams.SCHEDULES:
            self._wrap(schedule, plugin.schedule)
        self._wrap(seams.GPT_FORWARD, wrappers.model_forward)
        self._wrap(seams.BLOCK_FORWARD, wrappers.block_forward)
        if seams.HYBRID_FORWARD.is_present():
            self._wrap(seams.HYBRID_FORWARD, wrappers.model_forward)
            self._wrap(seams.HYBRID_STACK_FORWARD, wrappers.stack_forward)
        self._wrap(seams.ATTENTION_ROPE, wrap_rope)
        self._wrap(seams.DESTROY_PROCESS_GROUP, plugin.before_groups_go)
        self._wrap(seams.DESTROY_MODEL_PARALLEL, plugin.before_groups_go)

    def _wrap(self, seam: seams.Seam, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = seam.function()
        wrapped = functools.wraps(original)(wrapper(original))
        self._originals.append((seam, original))
        setattr(seam.owner(), seam.name, wrapped)

    def remove(self) -> None:
        """Puts every original back."""
        for seam, original in reversed(self._originals):
            setattr(seam.owner(), seam.name, original)
        self._originals.clear()
        try:
            self._write_report()
        finally:
            self.plugin.release()

    def _write_report(self) -> None:
        path = self._config.report
        if path is not None and int(os.environ.get("RANK", "0")) == 0:
            write_report(self.plugin.reports(), path)


_installation: _Installation | None = None


def install(config: GraphConfig | None = None) -> None:
    """Makes Megatron's packed training replay graphs.

    Call it once, before the first step; models may exist already. Nothing is captured here.

    Args:
        config: the options; by default those of the MEGAGRAPH_* variables.

    Raises:
        RuntimeError: if the plugin is installed already, megatron-core is absent or does not fit, or
            the machine has a GPU and this build no CUDA part.
    """
    global _installation
    if _installation is not None:
        raise RuntimeError("megagraph is installed already; uninstall() first to change its options")
    config = GraphConfig.from_env() if config is None else config
    if torch.cuda.is_available() and not _C.WITH_CUDA:
        raise RuntimeError(
            "this machine has a GPU, but megagraph was built without a CUDA compiler: install the CUDA "
            "toolkit of torch's CUDA version (nvcc, found through CUDA_HOME), then reinstall megagraph "
            "with `pip install --no-build-isolation --force-reinstall --no-deps .`"
        )
    version = seams.check_core()
    if config.mode == "off":
        return
    _installation = _Installation(Plugin(config, capture_progress if config.progress else None))
    _log.info("installed in megatron-core %s, mode %s", version, config.mode)


def uninstall() -> None:
    """Restores every function of Megatron by identity, writes the report, drops all graphs.

    Does nothing if not installed. Runs at exit, too. Of several ranks, rank 0 writes.
    """
    global _installation
    if _installation is not None:
        installation, _installation = _installation, None
        installation.remove()


def installed_plugin() -> Plugin | None:
    """The installed plugin, or None."""
    return None if _installation is None else _installation.plugin


def reports() -> list[dict[str, Any]]:
    """What every model did so far: one entry for each. Waits for the device."""
    plugin = installed_plugin()
    return [] if plugin is None else plugin.reports()


def suspend() -> None:
    """Runs every model eager until `resume()`; call it before weights or gradients are moved away."""
    plugin = installed_plugin()
    if plugin is not None:
        plugin.suspend()


def resume() -> None:
    """Replays again; what moved is captured anew at the next step boundary."""
    plugin = installed_plugin()
    if plugin is not None:
        plugin.resume()


# Graphs must be gone before process groups are: NCCL waits for them for ever.
atexit.register(uninstall)
