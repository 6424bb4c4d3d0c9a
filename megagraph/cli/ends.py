# SPDX-License-Identifier: Apache-2.0
"""How a command ends: its exit code, and one sentence on standard error where something is wrong."""

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from megagraph.report import STANDARD_OUTPUT, check_target, write_report

__all__ = [
    *("ExitCode", "Screen", "add_json", "check_json", "end", "ended_by", "folded", "sentence", "show"),
    "write_json",
]


# A cell of a table, with words that are too long for it on several lines; rich would cut them off.
folded = partial(Text, overflow="fold")


class ExitCode(IntEnum):
    """The exit codes of `megagraph`; under `megagraph run`, the script's own come first."""

    FINE = 0
    WRONG = 1  # bits differ, or something does not fit
    BAD_INPUT = 2  # argparse's own as well
    NOTHING_REPLAYED = 3
    CRASHED = 70  # EX_SOFTWARE of sysexits.h: Python's own 1 would read as bits that differ
    NOT_WRITTEN = 74  # EX_IOERR
    INTERRUPTED = 130  # 128 and the signal's number, as shells have it
    PIPE_CLOSED = 141


class Screen(Console):
    """A console that leaves it to `main()` what to do when its reader has gone; rich's would exit with 1."""

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the error."""
        raise


def sentence(error: BaseException) -> str:
    """What an error says, without the number that Python puts before what the system says."""
    if isinstance(error, OSError) and error.strerror:
        return f"{os.fspath(error.filename)}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def add_json(options: "argparse._ActionsContainer") -> None:
    """Adds `--json`, which `write_json()` follows, to what shows a table."""
    what = "write JSON instead of a table; - or nothing for standard output"
    options.add_argument("--json", type=Path, nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help=what)


def check_json(path: Path | None, read: Path | None = None) -> Path | None:
    """Raises `ValueError` if it cannot be written, or is what is `read`, or the script behind `--json`.

    Returns it as seen from the folder of now, which a script may leave.
    """
    if path is None or path == STANDARD_OUTPUT:
        return path
    if path.suffix in (".py", ".toml"):
        raise ValueError(f"--json: expected a file for the JSON, got {path}; for none write --json -")
    check_target("--json", path)
    if path.is_file():  # of what has no suffix, the script as well
        with path.open("rb") as file:
            if file.read(1) not in (b"", b"{"):
                raise ValueError(f"--json: expected a new file or one of JSON, got {path}")
    if read is not None and path.exists() and path.samefile(read):
        raise ValueError(f"--json: expected another file than the report that is read, got {path}")
    return path.absolute()


def write_json(command: str, path: Path, reports: Sequence[Mapping[str, Any]], /, **more: Any) -> ExitCode:
    """Writes what `--json` asks for; the exit code, with a sentence if it cannot be written."""
    try:
        write_report(reports, path, **more)
    except BrokenPipeError:
        raise
    except OSError as error:
        return end(command, f"--json: {sentence(error)}", ExitCode.NOT_WRITTEN)
    return ExitCode.FINE


def show(said: str, *shown: Any) -> None:
    """Prints what a command has found, tables and lines, and one sentence last."""
    screen = Screen()
    for it in (*shown, f"megagraph: {said}"):
        screen.print(it, markup=False, highlight=False, soft_wrap=isinstance(it, str))


def end(command: str, said: str, code: ExitCode) -> ExitCode:
    """Says a sentence, and hands the exit code on."""
    Console(stderr=True).print(f"megagraph {command}: {said}", markup=False, highlight=False, soft_wrap=True)
    return code


def ended_by(command: str, error: BaseException) -> int:
    """The exit code of a command of ours that an error ends; a crash keeps its traceback."""
    if isinstance(error, BrokenPipeError):
        _hush()
        return ExitCode.PIPE_CLOSED
    if isinstance(error, KeyboardInterrupt):
        return end(command, "interrupted", ExitCode.INTERRUPTED)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _hush()
        return end(command, sentence(error), ExitCode.NOT_WRITTEN)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        what = str(error).split("\n")[0] or "this machine's is used up"
        return end(command, f"not enough memory: {what}", ExitCode.CRASHED)
    if isinstance(error, SystemExit):  # of a script
        return end(command, f"the script ended with {error.code}", ExitCode.CRASHED)
    if not isinstance(error, Exception):
        raise error
    traceback.print_exception(error)
    return ExitCode.CRASHED


def _hush() -> None:
    """Has what is still to be written to standard output go nowhere, Python's own flush at exit included."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
