# SPDX-License-Identifier: Apache-2.0
"""The command line: `megagraph demo | run | report`."""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence

from rich.console import Console

from megagraph.cli import demo, run
from megagraph.cli.demo import ExitCode

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megagraph",
        description="CUDA graphs for Megatron training on packed sequences.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="demo | run | report")
    demo.add_parser(commands)
    run.add_parsers(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. What a user's script raises under `run` is raised."""
    options = _parser().parse_args(arguments)
    try:
        # All that can be wrong with the input is found here; what comes later keeps its traceback.
        work: Callable[[], int] = options.prepare(options)
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"megagraph {options.command}: {error}", markup=False, soft_wrap=True)
        return ExitCode.BAD_INPUT
    try:
        return work()
    except Exception:
        if options.command == "run":
            raise
        traceback.print_exc()
        return ExitCode.CRASHED


if __name__ == "__main__":
    sys.exit(main())
