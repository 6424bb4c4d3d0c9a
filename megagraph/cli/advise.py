# SPDX-License-Identifier: Apache-2.0
"""`megagraph advise SCRIPT [ARGS]`: whether graphs pay for a script, and which capacities its packs want."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from megagraph.cli.advice import Advice, Block, Findings, advice_on
from megagraph.cli.ends import ExitCode, add_json, check_json, show, write_json
from megagraph.cli.options import config_of
from megagraph.cli.reports import describe
from megagraph.cli.scripts import add_script, check_script, run_steps
from megagraph.cli.trial import FEWEST_STEPS, Trial
from megagraph.config import GraphConfig
from megagraph.log import rank
from megagraph.reasons import verdict
from megagraph.report import quartiles, versions

__all__ = ["add_parser"]

_MOST_STEPS = 100_000
_UNITS = "step_ms", "host_ms"


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "advise",
        help="run some steps of a script with and without graphs, and say whether they pay",
        description="Runs a script until its graphs are captured, and then --steps training steps, eager and "
        "graphed by turns; ends it, and says whether graphs pay and which capacities fit its packs. Without "
        "a GPU it says the latter. Under torchrun: torchrun ... -m megagraph advise SCRIPT.",
        epilog="Exit codes: 0 advice was given; 2 bad input; 3 nothing was replayed.",
    )
    add_json(parser)
    parser.add_argument(
        "--steps",
        type=int,
        default=40,
        metavar="N",
        help="training steps to look at after the capture, in pairs of blocks of four steps (40)",
    )
    add_script(parser)
    parser.set_defaults(prepare=_prepare)


def _prepare(options: argparse.Namespace) -> Callable[[], int]:
    options.json = check_json(options.json)
    if not FEWEST_STEPS <= options.steps <= _MOST_STEPS:
        least = f"at least {FEWEST_STEPS}" if options.steps < FEWEST_STEPS else f"at most {_MOST_STEPS}"
        raise ValueError(f"--steps: expected {least}, got {options.steps}")
    check_script(options)
    return partial(_advise, options, config_of(options))


def _advise(options: argparse.Namespace, config: GraphConfig) -> int:
    found = _try(options, config)
    if rank() != 0:
        return ExitCode.FINE
    advice = advice_on(found, config)
    has_replayed = any(report["replays"] for report in found.reports)
    code = ExitCode.FINE if has_replayed else ExitCode.NOTHING_REPLAYED
    if options.json is not None:
        more = {**_as_json(found, advice), "versions": versions()}
        return write_json("advise", options.json, found.reports, **more) or code
    tables = [_time_table(found.pairs)] if found.pairs else []
    if advice.choices:
        tables.append(_capacity_table(advice))
    show(advice.verdict, *tables, *_notes(found, advice))
    return code


def _try(options: argparse.Namespace, config: GraphConfig) -> Findings:
    console = Console(stderr=True)
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    is_silent = not console.is_terminal or rank() != 0
    # What the script prints goes above the bar on a terminal, and else where it always goes.
    shares = sys.stdout is not None and sys.stdout.isatty()
    bar = Progress(
        *columns,
        console=console,
        auto_refresh=False,  # by a thread, which would cost steps time that are timed
        transient=True,
        redirect_stdout=shares,
        disable=is_silent,
    )
    with bar:
        task = bar.add_task("training steps", total=None)
        trial = Trial(
            options.steps,
            lambda done, total: bar.update(task, completed=done, total=total, refresh=True),
            is_timed=torch.cuda.is_available(),
        )
        with contextlib.closing(trial):
            reports = run_steps(options, config, trial, mode="graph", report=None, progress=False)
    return trial.findings(config, reports)


# -- what is shown ---------------------------------------------------------------------------------


def _quartiles(seconds: Sequence[float]) -> list[float]:
    """Also of a single block."""
    return quartiles(seconds) or [1e3 * seconds[0]] * 3


def _times(blocks: Sequence[Block]) -> dict[str, Any]:
    """Quartiles of blocks, in ms a step."""
    return {
        "blocks": len(blocks),
        "step_ms": _quartiles([it.step for it in blocks]),
        "host_ms": _quartiles([it.host for it in blocks]),
    }


def _saved(pairs: Sequence[tuple[Block, Block]]) -> list[float]:
    """Host time of a step, in ms."""
    return _quartiles([eager.host - graphed.host for eager, graphed in pairs])


def _as_json(found: Findings, advice: Advice) -> dict[str, Any]:
    eager, graphed = zip(*found.pairs, strict=True) if found.pairs else ((), ())
    packs = {} if found.packs is None else found.packs.counts
    return {
        "verdict": advice.verdict,
        "pays": advice.pays,
        "replayed": verdict(found.reports),
        "speed_up": None if advice.speed_up is None else advice.speed_up._asdict(),
        "times": {"eager": _times(eager), "graphed": _times(graphed)} if found.pairs else None,
        "host_saved_ms": _saved(found.pairs) if found.pairs else None,
        "padding_share": advice.padding_share,
        "pool_bytes": sum(report["pool_bytes"] for report in found.reports),
        "packs": [{**shape.as_dict(), "count": count} for shape, count in sorted(packs.items())],
        "choices": [
            {"captures": index + 1, "padding_share": share, "capacities": [it.as_dict() for it in capacities]}
            for index, (capacities, share) in enumerate(advice.choices)
        ],
        "toml": advice.toml,
    }


def _time_table(pairs: Sequence[tuple[Block, Block]]) -> Table:
    eager, graphed = zip(*pairs, strict=True)
    table = Table("median of a step (quartiles of blocks)", title=f"{len(pairs)} pairs of blocks")
    for column in ("eager", "graphed", "saved"):
        table.add_column(column, justify="right")
    times = _times(eager), _times(graphed)
    saved = [_quartiles([one.step - other.step for one, other in pairs]), _saved(pairs)]
    for name, unit, less in zip(("whole step", "of it on the host"), _UNITS, saved, strict=True):
        table.add_row(name, *(_spread(it[unit]) for it in times), _spread(less))
    return table


def _spread(quartiles: Sequence[float]) -> str:
    least, median, most = quartiles
    return f"{median:.2f} ms ({least:.2f} to {most:.2f})"


def _capacity_table(advice: Advice) -> Table:
    table = Table("captures", "padding", "capacities", title="the best capacities for these packs")
    for index, (capacities, share) in enumerate(advice.choices):
        mark = " *" if index == advice.chosen else ""
        told = "\n".join(describe(it.as_dict()) for it in capacities)
        table.add_row(f"{index + 1}{mark}", f"{share:.1%}", told)
    return table


def _notes(found: Findings, advice: Advice) -> list[str]:
    notes = []
    if found.reports:
        pools = sum(report["pool_bytes"] for report in found.reports) / 2**20
        padding = "-" if advice.padding_share is None else f"{advice.padding_share:.1%}"
        notes.append(f"{verdict(found.reports)}; padding now {padding}; pools {pools:.0f} MiB")
    return [*notes, "", advice.toml, ""]
