# SPDX-License-Identifier: Apache-2.0
"""`megagraph report FILE`: what a run did."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from megagraph.report import read_leases, read_report, report_table
from megagraph.timeline import draw_timeline

__all__ = ["add_parser"]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("report", help="show the report that a run left")
    parser.add_argument("file", type=Path, help="JSON file, from MEGAGRAPH_REPORT or the config's `report`")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--json", action="store_true", help="print JSON instead of a table")
    instead.add_argument(
        "--timeline",
        type=Path,
        metavar="IMAGE",
        help="draw when the slots of each model chunk were in use, and show no table (needs matplotlib)",
    )
    parser.set_defaults(prepare=_prepare)


def _prepare(options: argparse.Namespace) -> Callable[[], int]:
    reports = read_report(options.file)
    if options.timeline is not None:
        draw_timeline(read_leases(options.file), options.timeline)
        return partial(_say, f"wrote {options.timeline}")
    return partial(_show, reports, as_json=options.json)


def _say(what: str) -> int:
    print(what)
    return 0


def _show(reports: list[dict[str, Any]], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(reports, indent=2))
    else:
        Console().print(report_table(reports))
    return 0
