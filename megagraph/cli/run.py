# SPDX-License-Identifier: Apache-2.0
"""`megagraph run SCRIPT [ARGS]`: a user's training script, unchanged, with the plugin installed."""

import argparse
import logging
import runpy
import sys
from pathlib import Path

from rich.console import Console

from megagraph.config import GraphConfig
from megagraph.report import report_table

__all__ = ["add_parser"]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "run",
        help="run a training script with the plugin installed",
        description="Options come from --config, and MEGAGRAPH_* variables go before it "
        "(docs/configuration.md). Under torchrun: torchrun ... -m megagraph run SCRIPT.",
    )
    parser.add_argument("--config", type=Path, help="TOML file with a table [megagraph]")
    parser.add_argument("script", type=Path, help="the script, run as __main__")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the script")
    parser.set_defaults(execute=_execute)


def _execute(options: argparse.Namespace) -> int:
    if not options.script.is_file():
        raise FileNotFoundError(f"expected a script, {options.script} is no file")
    base = GraphConfig.from_toml(options.config) if options.config is not None else None
    config = GraphConfig.from_env(base=base)
    from megagraph import megatron

    _log_to_stderr()
    megatron.install(config)
    outer = sys.argv, sys.path[0]
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)
    try:
        runpy.run_path(str(options.script), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = outer
        reports = megatron.reports()
        if reports:
            Console(stderr=True).print(report_table(reports))
        megatron.uninstall()
    return 0


def _log_to_stderr() -> None:
    """Shows the plugin's own messages, unless the application has set logging up itself."""
    logger = logging.getLogger("megagraph")
    if not logging.getLogger().handlers and not any(
        not isinstance(handler, logging.NullHandler) for handler in logger.handlers
    ):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("megagraph: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
