# SPDX-License-Identifier: Apache-2.0
"""The command line."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import megagraph
from megagraph.cli import advise, demo, doctor, options, reports, run
from megagraph.cli.ends import ExitCode, end, ended_by, sentence
from megagraph.cli.scripts import found_first
from megagraph.megatron import seams

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong, as the commands do; argparse would show every option."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Says of a mistyped option which command it was typed for; argparse would name none."""
        known, unknown = super().parse_known_args(args, namespace)
        return (known, unknown) if not unknown else self.error(f"unrecognized arguments: {' '.join(unknown)}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megagraph",
        description="CUDA graphs for Megatron training on packed sequences.",
    )
    parser.add_argument("--version", action="version", version=f"megagraph {megagraph.__version__}")
    # Not required: argparse would say so of a mistyped option before it, too.
    commands = parser.add_subparsers(dest="command")
    demo.add_parser(commands)
    run.add_parser(commands)
    reports.add_parser(commands)
    doctor.add_parser(commands)
    advise.add_parser(commands)
    options.add_parser(commands)
    commands.metavar = " | ".join(commands.choices)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. What a user's script raises under `run` is raised."""
    parser = _parser()
    given = parser.parse_args(arguments)
    command = given.command
    if command is None:
        parser.error("expected a command")
    with found_first(given):
        return _run(command, given)


def _run(command: str, given: argparse.Namespace) -> int:
    try:
        try:
            # All that can be wrong with the input is found here; what comes later keeps its traceback.
            work: Callable[[], int] = given.prepare(given)
            if getattr(given, "script", None):
                seams.check_core()
        except (ValueError, OSError, RuntimeError) as error:
            return end(command, sentence(error), ExitCode.BAD_INPUT)
        if command != "run":
            code = work()
            if sys.stdout is not None:  # it is, if it was closed from the beginning
                sys.stdout.flush()
            return code
    except BaseException as error:
        return ended_by(command, error)
    return work()
