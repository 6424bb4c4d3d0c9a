# SPDX-License-Identifier: Apache-2.0
"""`megagraph run SCRIPT [ARGS]`: a user's training script, unchanged, with the plugin installed.

`megagraph report FILE` shows what such a run did.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import megagraph
from megagraph.cli.ends import Screen, add_json, write_json
from megagraph.cli.options import config_of
from megagraph.cli.scripts import add_script, check_script, log_to_stderr, run_script
from megagraph.config import GraphConfig
from megagraph.decide.reasons import saved, verdict
from megagraph.log import rank
from megagraph.megatron.patch.installation import installed_plugin
from megagraph.report import (
    check_target,
    read_leases,
    read_report,
    report_table,
)
from megagraph.timeline import draw_timeline

__all__ = ["add_parsers"]


def add_parsers(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds both commands."""
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
    parser.set_defaults(prepare=_prepare_run)

    parser = commands.add_parser("report", help="show the report that a run left")
    parser.add_argument("file", type=Path, help="JSON file, from MEGAGRAPH_REPORT or the config's `report`")
    instead = parser.add_mutually_exclusive_group()
    add_json(instead)
    instead.add_argument(
        "--timeline",
        type=Path,
        metavar="IMAGE",
        help="draw when the slots of each model chunk were in use, and show no table (needs matplotlib)",
    )
    parser.set_defaults(prepare=_prepare_report)


def _prepare_run(options: argparse.Namespace) -> Callable[[], int]:
    check_script(options)
    config = config_of(options)
    if config.mode != "off":  # which writes none
        if options.json is not None:
            written, config = "--json", dataclasses.replace(config, report=options.json)
        elif any(it.partition("=")[0] == "report" for it in options.set):
            written = "--set: report"
        elif os.environ.get("MEGAGRAPH_REPORT"):
            written = "environment: MEGAGRAPH_REPORT"
        else:
            written = f"{options.config}: report"
        check_target(written, config.report)
    return partial(_run, options, config)


def _run(options: argparse.Namespace, config: GraphConfig) -> int:
    log_to_stderr()
    megagraph.install(config)
    ended_by = ""
    try:
        run_script(options)
    except BaseException as error:
        ended_by = "" if isinstance(error, SystemExit) else type(error).__name__
        raise
    finally:
        plugin, reports = installed_plugin(), megagraph.reports()
        if reports and rank() == 0:
            Screen(stderr=True).print(report_table(reports))
        megagraph.uninstall()
        if rank() == 0:
            why = "mode is off" if config.mode == "off" else "the script has called uninstall()"
            said = verdict(reports) if plugin is not None else f"nothing is known: {why}"
            if ended_by and plugin is not None and not reports:
                said = f"nothing replayed: {ended_by} ended the script before a model ran"
            times = "" if plugin is None else saved(plugin.clock.report())
            for line in filter(None, (times, said)):
                Screen(stderr=True).print(f"megagraph: {line}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _prepare_report(options: argparse.Namespace) -> Callable[[], int]:
    if not options.file.is_file():
        raise ValueError(f"expected the file of a report, {options.file} is no file")
    reports = read_report(options.file)
    shown: Any = report_table(reports)
    if options.timeline is not None:
        draw_timeline(read_leases(options.file), options.timeline)
        shown = f"wrote {options.timeline}"
    elif options.json is not None:
        check_target("--json", options.json)
        return partial(write_json, "report", options.json, reports, verdict=verdict(reports))
    return partial(_show, shown, verdict(reports))


def _show(shown: Any, said: str) -> int:
    if isinstance(shown, str):
        print(shown)
    else:
        Screen().print(shown)
        print(said)
    return 0
