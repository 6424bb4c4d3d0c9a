# SPDX-License-Identifier: Apache-2.0
"""A user's training script or module, run unchanged as `__main__` by whichever command."""

import argparse
import contextlib
import importlib.machinery
import importlib.util
import logging
import os
import runpy
import sys
from pathlib import Path

import torch

from megagraph.cli.options import add_config_options

__all__ = ["add_script", "check_script", "log_to_stderr", "run_script"]


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
    parser.add_argument("script", nargs="?" if is_optional else None, help="the script, run as __main__")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the script")


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
    if options.cpu and torch.cuda.is_available():
        raise ValueError("--cpu: this machine has a GPU; hide it with CUDA_VISIBLE_DEVICES=")


def run_script(options: argparse.Namespace) -> None:
    """Runs it. What it raises is raised."""
    from megagraph.demo.cpu import megatron_on_cpu

    name, outer = options.script, (sys.argv, sys.path[:])
    sys.argv = [name, *options.arguments]
    # Before what is there, which processes that the script starts may need to find this package.
    sys.path.insert(0, os.getcwd() if options.is_module else str(Path(name).resolve().parent))
    try:
        with megatron_on_cpu() if options.cpu else contextlib.nullcontext():
            if options.is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = outer


def log_to_stderr() -> None:
    """Shows the plugin's own messages, unless the application has set logging up itself."""
    logger = logging.getLogger("megagraph")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("megagraph: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # the script may set the root's handlers later
        logger.setLevel(logging.INFO)
