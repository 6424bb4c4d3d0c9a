# SPDX-License-Identifier: Apache-2.0
"""A user's training script or module, run unchanged as `__main__` by whichever command.

To its end, or for as many training steps as the command looks at.
"""

import argparse
import contextlib
import functools
import importlib.machinery
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import megagraph
from megagraph.cli.options import add_config_options
from megagraph.config import GraphConfig
from megagraph.log import log
from megagraph.megatron import seams
from megagraph.megatron.patch.installation import install_with, installed_plugin
from megagraph.megatron.plugin import Plugin

__all__ = [
    *("EnoughError", "add_script", "check_script", "found_first", "log_to_stderr", "run_script", "run_steps"),
]

# Runs a training step, a function without arguments, and returns what that does.
_Around = Callable[[Plugin, Callable[[], Any]], Any]


class EnoughError(BaseException):
    """Ends a script in `run_steps()`; no Exception, which the script might handle."""


class _Script(argparse.Action):
    """A script, and its arguments as they were typed."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        # Before Python 3.13 a `--` before the script is there as well.
        namespace.script, *namespace.arguments = values[values[0] == "--" :]


def add_script(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Adds what names a script, and what it runs under."""
    add_config_options(parser)
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module's name, as of python -m"
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="without a GPU: what Megatron does on CUDA devices happens on the CPU",
    )
    # One of argparse's for both: of two, the first would swallow a `--` that is the script's own.
    what = "the script, run as __main__, and what is handed to it"
    shown = "[script]" if is_optional else None
    script = parser.add_argument("script", nargs=argparse.PARSER, action=_Script, metavar=shown, help=what)
    script.required = not is_optional
    parser.set_defaults(arguments=[])


def check_script(options: argparse.Namespace) -> None:
    """Raises `ValueError` if it cannot be run."""
    name: str = options.script
    if options.is_module:
        package = name.partition(".")[0]
        is_name = all(part.isidentifier() for part in name.split("."))
        if not is_name or not (
            importlib.machinery.PathFinder.find_spec(package, [os.getcwd()])
            or importlib.util.find_spec(package)
        ):
            raise ValueError(f"-m: expected a module, found none named {name}")
    elif not Path(name).is_file():
        raise ValueError(f"expected a script, {name} is no file")
    elif not os.access(name, os.R_OK):
        raise ValueError(f"expected a script, {name} cannot be read")
    if options.cpu and torch.cuda.is_available():
        raise ValueError("--cpu: this machine has a GPU; hide it with CUDA_VISIBLE_DEVICES=")


@contextlib.contextmanager
def found_first(options: argparse.Namespace) -> Iterator[None]:
    """Has Python look beside a script first, as it does if it runs one by itself: Megatron may be there."""
    outer = sys.path[:]
    if name := getattr(options, "script", None):
        # Before what is there, which processes that the script starts may need to find this package.
        sys.path.insert(0, os.getcwd() if options.is_module else str(Path(name).resolve().parent))
    try:
        yield
    finally:
        sys.path[:] = outer


def run_script(options: argparse.Namespace) -> None:
    """Runs it. What it raises is raised."""
    from megagraph.demo.cpu import megatron_on_cpu

    name, outer = options.script, sys.argv
    sys.argv = [name, *options.arguments]
    try:
        with megatron_on_cpu() if options.cpu else contextlib.nullcontext():
            if options.is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                # As Python does since 3.9: a script that goes elsewhere still finds its own `__file__`.
                runpy.run_path(os.path.abspath(name), run_name="__main__")
    except Exception:
        if not torch.cuda.is_available() and not options.cpu:
            log.warning("the script has failed on a machine without a GPU: if it asks for one, add --cpu")
        raise
    finally:
        sys.argv = outer


def run_steps(
    options: argparse.Namespace, config: GraphConfig, around: _Around, **changes: Any
) -> list[dict[str, Any]]:
    """Runs a script under the plugin, each training step in `around`, to its end or until that says enough.

    With the user's options, but for `changes`. Returns what every model did.
    """
    log_to_stderr()
    install_with(config, **changes)
    plugin = installed_plugin()
    assert plugin is not None

    def wrapped(schedule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(schedule)
        def step(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(schedule, *args, **kwargs)
            return run() if kwargs.get("forward_only", False) else around(plugin, run)

        return step

    with contextlib.ExitStack() as undo:
        undo.callback(megagraph.uninstall)
        with contextlib.ExitStack() as schedules, contextlib.suppress(EnoughError):
            for schedule in seams.SCHEDULES:
                instead = {schedule.name: wrapped(schedule.function())}
                schedules.enter_context(seams.stand_in(schedule.owner(), **instead))
            try:
                run_script(options)
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise  # it has failed: nothing is told of it
        return plugin.reports()


def log_to_stderr() -> None:
    """Shows the plugin's own messages, unless the application has set logging up itself."""
    logger = logging.getLogger("megagraph")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("megagraph: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # the script may set the root's handlers later
        logger.setLevel(logging.INFO)
