# SPDX-License-Identifier: Apache-2.0
"""Puts the plugin into megatron-core and takes it out again. Nothing is patched at import."""

import atexit
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megagraph import _C
from megagraph.config import GraphConfig
from megagraph.log import log
from megagraph.megatron import seams
from megagraph.megatron.patch import experts, forwards, inside_layers, overlap
from megagraph.megatron.plugin import Plugin
from megagraph.reasons import verdict
from megagraph.report import (
    STANDARD_OUTPUT,
    check_target,
    is_replaced_by,
    path_of_report,
    report_text,
    versions,
    write_report,
)

__all__ = ["install", "install_with", "installed_plugin", "reports", "resume", "suspend", "uninstall"]


_Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

_plugin: Plugin | None = None  # the installed one
_asked: GraphConfig | None = None  # what a further install() may ask for
_process = 0  # that has installed it
_undo = contextlib.ExitStack()  # puts every original back, then writes the report and drops all graphs
_covered: list[str] = []  # what was found under others' wrappers when originals were put back


def _wrap(seam: seams.Seam, wrapper: _Wrapper, call: _Wrapper | None = None) -> None:
    """Wraps what is at a seam; with `call` the call of its class, too.

    Not what a host has put there that does not fit: models that need it are refused.
    """
    if seam.problem() is not None:
        return
    owner = seam.owner()
    for name, wrap in ((seam.name, wrapper), ("__call__", call)):
        if wrap is not None:
            original = getattr(owner, name)
            ours = functools.wraps(original)(wrap(original))
            _undo.callback(_put_back, seams.stand_in(owner, **{name: ours}), owner, name, ours)


def _put_back(put_back: contextlib.ExitStack, owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Puts an original back, but from under what somebody has put over ours: that goes on calling ours."""
    if vars(owner).get(name) is ours:
        put_back.close()
    else:
        _covered.append(f"{owner.__name__}.{name}")


def _wrap_all(plugin: Plugin) -> None:
    def of(wrapper: Callable[..., Callable[..., Any]], **options: Any) -> _Wrapper:
        return functools.partial(wrapper, plugin, **options)

    of_models = of(forwards.wrap_model_forward), of(forwards.wrap_model_call)
    block_call = of(forwards.wrap_block_call)
    for schedule in seams.SCHEDULES:
        _wrap(schedule, plugin.schedule)
    _wrap(seams.MODEL_INIT, plugin.before_model)
    _wrap(seams.GPT_FORWARD, *of_models)
    _wrap(seams.GPT_PLAN, of(overlap.wrap_plan))
    _wrap(seams.PLANNED_STEP, of(overlap.wrap_step))
    _wrap(seams.BLOCK_FORWARD, of(forwards.wrap_block_forward), block_call)
    if (hybrid := seams.hybrid_seams()) is not None:
        model, stack = hybrid
        _wrap(model, *of_models)
        _wrap(stack, of(forwards.wrap_block_forward, kept=seams.KEPT_BY_STACKS), block_call)
        if not seams.packs_have("seq_idx"):
            _wrap(seams.MIXER_DOCUMENTS, inside_layers.wrap_documents)
    _wrap(seams.PREDICTION_FORWARD, of(forwards.wrap_prediction))
    for seam in (seams.ATTENTION_ROPE, seams.MLA_ROPE, seams.PACKED_ROPE, seams.FUSED_ROPE):
        function = seam.function()
        if function is not None and seams.made_in(function) != seams.PACKED_ROPE.module:
            _wrap(seam, functools.partial(inside_layers.wrap_foreign_rope, seam))
        elif seam is seams.PACKED_ROPE:
            _wrap(seam, inside_layers.wrap_rope)
    for seam in (seams.MLA_QUERY_ROPE, seams.MLA_KEY_ROPE):
        _wrap(seam, functools.partial(inside_layers.wrap_mla_rope, seam))
    if seams.has_engine():
        _wrap(seams.ENGINE_ATTENTION, inside_layers.wrap_engine_attention)
    _wrap(seams.ROUTER_FORWARD, of(experts.wrap_router))
    _wrap(seams.ROUTING, of(experts.wrap_routing))
    _wrap(seams.EXPERT_CHOICE, experts.wrap_choice)
    _wrap(seams.EXPERT_BIAS, experts.wrap_expert_bias)
    _wrap(seams.PERMUTED_ROWS, experts.wrap_permuted_rows)
    _wrap(seams.PERMUTATION, experts.wrap_permutation)
    _wrap(seams.DESTROY_PROCESS_GROUP, plugin.before_groups_go)
    _wrap(seams.DESTROY_MODEL_PARALLEL, plugin.before_groups_go)


def _write_report(plugin: Plugin, first: Path | None, *, is_over: bool = True) -> None:
    """No run fails for its report. Before it is over, only a file gets one, which the next one replaces."""
    path = None if first is None else path_of_report(first, plugin.stage)
    if path is None or not (is_over or is_replaced_by(path)):
        return
    reports, leases = plugin.reports(), plugin.leases()
    if not reports and multiprocessing.parent_process() is not None:
        return  # a worker that only imports Megatron, as of a DataLoader: the file is its parent's
    more: dict[str, Any] = {"verdict": verdict(reports), "steps": plugin.training_steps}
    more |= {"times": plugin.clock.report()}
    more |= {"versions": versions(), "config": plugin.config.spelled()}
    more |= {"stages": plugin.stages} if plugin.stages > 1 else {}
    more |= {"leases": leases} if leases else {}
    try:
        write_report(reports, path, **more)
    except (OSError, ValueError) as error:  # the latter of a standard output that is closed
        if is_over:
            log.error("the report could not be written to %s (%s); it follows", path, error)
            sys.stderr.write(report_text(reports, **more))


def install(
    config: GraphConfig | str | os.PathLike[str] | None = None,
    *,
    name: str | Callable[[Any], str | None] | None = None,
) -> None:
    """Makes Megatron's packed training replay graphs.

    Call it before the first step; models may exist already. Nothing is captured here. A second call that asks
    for what is installed does nothing, but for a `name` of models that have not run yet.

    Args:
        config: the options, or the path of a TOML file with them, over which MEGAGRAPH_* variables go; by
            default the variables alone.
        name: what log and report call a model, or a function that says so of each GPTModel or HybridModel
            (without what wraps it) when it first runs; by default, or if that returns None, its class. Of
            several with one name the later ones get a number.

    Raises:
        TypeError: if `config` or `name` is anything else.
        ValueError: if an option is not what it should be, or its report cannot be written.
        RuntimeError: if the plugin is installed already with other options, megatron-core is absent or does
            not fit, or the machine has a GPU and this build no CUDA part.
    """
    global _plugin, _asked, _process
    name_of = _naming(name)
    version = seams.check_core()  # may be the first to import it, for which megagraph/auto.py waits
    config = _as_config(config, _asked)
    if _asked is not None:
        if _plugin is None:
            log.info("mode is off, and the script's own install() does nothing")
            return
        if config == _asked:
            _plugin.name_of = name_of or _plugin.name_of
            return
        option = next(it for it, value in vars(config).items() if value != getattr(_asked, it))
        difference = f"{option} is {getattr(_asked, option)}, not {getattr(config, option)}"
        raise RuntimeError(
            f"megagraph is installed already, with other options ({difference}): "
            "uninstall() first, or under `megagraph run` or MEGAGRAPH_AUTO leave install() out of the script"
        )
    if torch.cuda.is_available() and not _C.WITH_CUDA:
        raise RuntimeError(
            "this machine has a GPU, but megagraph was built without a CUDA compiler: install the CUDA "
            "toolkit of torch's CUDA version (nvcc, found through CUDA_HOME), then reinstall megagraph "
            "with `pip install --no-build-isolation --force-reinstall --no-deps .`"
        )
    if config.mode == "off":
        return
    check_target("report", config.report)
    plugin, report, _process = Plugin(config), config.report, os.getpid()
    _undo.callback(plugin.release)
    if report is not None and report != STANDARD_OUTPUT:
        report = report.absolute()  # as seen from the folder of now
    _undo.callback(_write_report, plugin, report)
    plugin.leave_report = functools.partial(_write_report, plugin, report, is_over=False)
    plugin.name_of = name_of or plugin.name_of
    _wrap_all(plugin)
    _plugin, _asked = plugin, config
    if version.split("+")[0] not in seams.SUPPORTED:  # without the commit that core may append
        log.warning(
            "megatron-core %s is untested (tested: %s); its seams fit", version, ", ".join(seams.SUPPORTED)
        )
    log.info("installed in megatron-core %s, mode %s", version, config.mode)


def install_with(config: GraphConfig, **changes: Any) -> None:
    """For a command that changes options of the user, which a script may still ask for."""
    global _asked, _process
    install(dataclasses.replace(config, **changes))
    _asked, _process = config, os.getpid()  # in mode `off` as well


def _as_config(given: object, installed: GraphConfig | None) -> GraphConfig:
    """The options that are asked for; without any, what is installed will do."""
    if isinstance(given, GraphConfig):
        return given
    if given is None:
        return GraphConfig.from_env(base=installed)
    if isinstance(given, str | os.PathLike):
        return GraphConfig.from_env(base=GraphConfig.from_toml(given))
    raise TypeError(
        "install(): expected megagraph.GraphConfig(...), the path of a TOML file, or nothing, "
        f"got {type(given).__name__} {given!r}"
    )


def _naming(name: object) -> Callable[[Any], str | None] | None:
    if isinstance(name, str) and name:
        return lambda model: name
    if name is None or callable(name):
        return name
    raise TypeError(f"install(): name: expected text or a function of a model, got {name!r}")


def uninstall() -> None:
    """Restores every function of Megatron by identity, writes the report, drops all graphs.

    Of a function that somebody else has wrapped since, the wrapper stays, with ours below it, which passes
    every call on; a warning names it. Does nothing if not installed. Runs at exit, too. Of several ranks,
    rank 0 writes, and of a pipeline one rank of each further stage, into `NAME.stage1.json` and so on beside
    it; a report that cannot be written is logged, and printed to standard error instead.
    """
    _take_out()
    if _covered:
        names = ", ".join(dict.fromkeys(_covered))
        log.warning("%s: wrapped by somebody since install(), so left in place to pass calls on", names)
        _covered.clear()


def _take_out() -> None:
    global _plugin, _asked
    if os.getpid() != _process:  # a fork: graphs and report are its parent's
        return
    _plugin = _asked = None
    _undo.close()


def installed_plugin() -> Plugin | None:
    """The installed plugin, or None."""
    return _plugin


def reports() -> list[dict[str, Any]]:
    """What every model did so far: one entry for each. Waits for the device."""
    return [] if _plugin is None else _plugin.reports()


def suspend() -> None:
    """Runs every model eager until `resume()`; call it before weights or gradients are moved away."""
    if _plugin is not None:
        _plugin.set_suspended(True)


def resume() -> None:
    """Replays again; what moved is captured anew at the next step boundary."""
    if _plugin is not None:
        _plugin.set_suspended(False)


# Graphs must be gone before process groups are: NCCL waits for them for ever.
atexit.register(_take_out)
