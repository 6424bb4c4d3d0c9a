# SPDX-License-Identifier: Apache-2.0
"""`megagraph run SCRIPT [ARGS]`: a user's training script, unchanged, with the plugin installed."""

import argparse
import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import megagraph
from megagraph.cli.ends import Screen, check_json
from megagraph.cli.options import config_of
from megagraph.cli.reports import report_table
from megagraph.cli.scripts import add_script, check_script, log_to_stderr, run_script
from megagraph.config import GraphConfig
from megagraph.log import rank
from megagraph.megatron.patch.installation import install_with, installed_plugin
from megagraph.reasons import verdict
from megagraph.report import check_target

__all__ = ["add_parser", "saved"]


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "run",
        help="run a training script with the plugin installed",
        description="Options come from --config; MEGAGRAPH_* variables go before it, and --set before both "
        "(docs/configuration.md). Under torchrun: torchrun ... -m megagraph run SCRIPT.",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report as JSON; - for standard output"
    )
    add_script(parser)
    parser.set_defaults(prepare=_prepare)


def _prepare(options: argparse.Namespace) -> Callable[[], int]:
    check_json(options.json)
    check_script(options)
    config = config_of(options)
    if config.mode != "off" and options.json is None:  # `off` writes none
        if any(it.partition("=")[0] == "report" for it in options.set):
            written = "--set: report"
        elif os.environ.get("MEGAGRAPH_REPORT"):
            written = "environment: MEGAGRAPH_REPORT"
        else:
            written = f"{options.config or os.environ.get('MEGAGRAPH_CONFIG')}: report"
        check_target(written, config.report)
    return partial(_run, options, config)


def _run(options: argparse.Namespace, config: GraphConfig) -> int:
    log_to_stderr()
    install_with(config, **({} if options.json is None else {"report": options.json}))
    ended_by, process = "", os.getpid()
    try:
        run_script(options)
    except BaseException as error:
        ended_by = "" if isinstance(error, SystemExit) else type(error).__name__
        raise
    finally:
        if process == os.getpid():  # and no fork of it that the script has ended
            _end(config, ended_by)
    return 0


def _end(config: GraphConfig, ended_by: str) -> None:
    plugin, reports = installed_plugin(), megagraph.reports()
    megagraph.uninstall()
    if rank() == 0:
        is_off = config.mode == "off"
        why = "mode is off, so no report is written" if is_off else "the script has called uninstall()"
        said = verdict(reports) if plugin is not None else f"nothing is known: {why}"
        if ended_by and plugin is not None and not reports:
            said = f"nothing replayed: {ended_by} ended the script before a model ran"
        times = "" if plugin is None else saved(plugin.clock.report())
        with contextlib.suppress(OSError):  # nobody reads it, and the script's own exit code comes through
            if reports:
                Screen(stderr=True).print(report_table(reports))
            for line in filter(None, (times, said)):
                Screen(stderr=True).print(f"megagraph: {line}", markup=False, highlight=False, soft_wrap=True)


def saved(times: Mapping[str, Any]) -> str:
    """What graphs save the host in a step, if eager ones were timed in the warm-up; else nothing."""
    eager, graphed = (times.get(kind, {}).get("host_ms") for kind in ("eager", "graphed"))
    if not eager or not graphed:
        return ""
    told = ("{1:.1f} ms ({0:.1f} to {2:.1f})".format(*it) for it in (eager, graphed))
    return "forward and backward of a step kept the host for {} eager, {} graphed".format(*told)
