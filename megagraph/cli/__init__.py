# SPDX-License-Identifier: Apache-2.0
"""The command line: `megagraph demo | run | report`."""

import argparse
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from megagraph.cli import demo, report, run

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megagraph",
        description="CUDA graphs for Megatron training on packed sequences.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="demo | run | report")
    for command in (demo, run, report):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, 1 where bits differ, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        # All that can be wrong with the input is found here; what comes later keeps its traceback.
        work: Callable[[], int] = options.prepare(options)
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"megagraph {options.command}: {error}", markup=False, soft_wrap=True)
        return 2
    return work()


if __name__ == "__main__":
    sys.exit(main())
