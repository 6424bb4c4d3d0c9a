# SPDX-License-Identifier: Apache-2.0
"""What a run does, for people and for programs: how long steps take; counters to JSON and to scalars.

A model's report is the plain dictionary that the Megatron floor makes; megagraph/cli/reports.py shows it.
"""

import contextlib
import errno
import json
import os
import platform
import re
import stat
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

import megagraph
from megagraph.log import rank

__all__ = [
    *("FORMAT", "STANDARD_OUTPUT", "ModelReport", "StepClock", "capture_progress", "check_target"),
    *("is_replaced_by", "path_of_report", "path_of_stage", "quartiles", "report_text", "scalars"),
    *("versions", "write_report"),
]

ModelReport = Mapping[str, Any]

STANDARD_OUTPUT = Path("-")
FORMAT = 2  # of the document; the first one did not say its own
_MOST_STEPS = 1000  # of each kind: the last ones


class StepClock:
    """Measures training steps of each kind, such as eager and graphed ones, and waits for no device.

    On the host, which is what graphs shorten, and from the begin of one to that of the next of its kind.
    """

    def __init__(self) -> None:
        some: Any = partial(deque[float], maxlen=_MOST_STEPS)
        self._host: dict[str, deque[float]] = defaultdict(some)
        self._between: dict[str, deque[float]] = defaultdict(some)
        self._last: tuple[str, float] | None = None  # if it was one, and nothing has run since

    @contextlib.contextmanager
    def step(self, kind: str | None) -> Iterator[None]:
        """Around a step; None if it is not to be measured."""
        begin, last = time.perf_counter(), self._last
        self._last = None
        if kind is None:
            yield
            return
        if last is not None and last[0] == kind:
            self._between[kind].append(begin - last[1])
        yield
        self._host[kind].append(time.perf_counter() - begin)
        self._last = kind, begin

    def report(self) -> dict[str, Any]:
        """Of each kind the number of steps, and quartiles in ms; null without two of them."""
        return {
            kind: {"steps": len(host), "host_ms": quartiles(host), "step_ms": quartiles(self._between[kind])}
            for kind, host in self._host.items()
        }


def quartiles(seconds: Sequence[float]) -> list[float] | None:
    """In ms; None without two of them."""
    if len(seconds) < 2:
        return None
    return [1e3 * it for it in statistics.quantiles(seconds, n=4, method="inclusive")]


def versions() -> dict[str, str | None]:
    """Of all that decides what a run does."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("megatron-core", "transformer-engine"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found | {"megagraph": megagraph.__version__, "torch": str(torch.__version__)}


def scalars(reports: Sequence[ModelReport], since: Sequence[ModelReport] = ()) -> dict[str, float]:
    """Numbers by name, as the writers of TensorBoard and W&B take them: what models did since other reports.

    A name is `megagraph/MODEL/WHAT`. Shares are of the interval too, and left out if nothing ran in it.
    """
    before = {report["model"]: _counts(report) for report in since}
    found: dict[str, float] = {}
    for report in reports:
        counts, old = _counts(report), before.get(report["model"], {})
        values = {what: count - old.get(what, 0) for what, count in counts.items()}
        if values["calls"]:
            values["replay_share"] = values["replays"] / values["calls"]
        if values["replayed_rows"]:
            values["padding_share"] = values["padding_rows"] / values["replayed_rows"]
        # No writer then replaces what it does not take in a way of its own.
        model = re.sub(r"[^\w.-]+", "_", report["model"]).strip("_")
        found |= {f"megagraph/{model}/{what}": float(value) for what, value in values.items()}
    return found


def _counts(report: ModelReport) -> dict[str, float]:
    """All that grows while a model runs."""
    counts = {what: report.get(what, 0) for what in ("calls", "replays", "capture_seconds", "replayed_rows")}
    counts["padding_rows"] = round(counts["replayed_rows"] * (report["padding_share"] or 0.0))
    counts |= {f"eager/{reason}": count for reason, count in report["eager"].items()}
    for size, of_size in report.get("cp_sizes", {}).items():
        counts |= {f"cp_{size}/{what}": count for what, count in of_size.items()}
    return counts


def report_text(reports: Sequence[ModelReport], **more: Any) -> str:
    """The reports as JSON, with further keys of the document beside `models`."""
    return json.dumps({"format": FORMAT, "models": list(reports), **more}, indent=2) + "\n"


def check_target(option: str, path: Path | None) -> None:
    """Checks before a run that `write_report()` will be able to write its file, on the rank that writes.

    Makes no folder and leaves the file alone.

    Raises:
        ValueError: naming the option, the path, and the folder that stands in the way.
    """
    path = None if path is None else path_of_report(path)
    if path is None or _is_standard_output(path):
        return
    place = path
    try:
        if path.is_dir():
            raise ValueError(f"{option}: expected a file, {path} is a folder")
        if (target := _file_behind(path)) is not None:
            place = next(parent for parent in target.parents if parent.exists())
            tempfile.TemporaryFile(dir=place).close()
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"{option}: expected a file that can be written, got {path}: {place}: {error.strerror or error}"
        ) from error


def write_report(reports: Sequence[ModelReport], path: Path, **more: Any) -> None:
    """Writes the reports as JSON; makes the file's folder if it is missing.

    A file is replaced as a whole or not at all, the one that a symbolic link names and not the link. Anything
    else that is there, such as a device or a FIFO, is written into. `-` is standard output.

    `more` are further keys of the document, which `read_report()` passes over.

    Raises:
        OSError: if the file cannot be written.
    """
    text = report_text(reports, **more)
    if _is_standard_output(path):
        if sys.stdout is not None:
            sys.stdout.write(text)
    elif (target := _file_behind(path)) is None:
        path.write_text(text, encoding="utf-8")
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".megagraph.{os.getpid()}")  # however long the file's own name is
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)


def _file_behind(path: Path) -> Path | None:
    """The file that a path names behind all symbolic links, there or not; None if it is no regular file."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            return None
    return Path(os.path.realpath(path))


def _is_standard_output(path: Path) -> bool:
    """Also by another name, as `/dev/stdout`: if a shell has a file for it, no draft may replace that."""
    try:
        return path == STANDARD_OUTPUT or os.path.samestat(path.stat(), os.fstat(1))
    except OSError:  # it is closed, or nothing is there
        return False


def is_replaced_by(path: Path) -> bool:
    """Whether `write_report()` can put a new file in the place of this path, and writes into nothing."""
    try:
        return not _is_standard_output(path) and _file_behind(path) is not None
    except OSError:  # its folder is none any more
        return False


def path_of_report(path: Path, stage: int = 0) -> Path | None:
    """Where this process leaves its report; None if another one does that for it.

    With its rank (`%r`) or process (`%p`) in the path each has its own; else rank 0 writes, and one rank of
    each further stage.
    """
    own = Path(str(path).replace("%r", str(rank())).replace("%p", str(os.getpid())))
    if own != path:
        return own
    return None if rank() != 0 and stage == 0 else path_of_stage(path, stage)


def path_of_stage(path: Path, stage: int) -> Path:
    """Where a stage of a pipeline leaves its report, beside the first one's."""
    if path == STANDARD_OUTPUT or not stage:
        return path
    return path.with_name(f"{path.stem}.stage{stage}{path.suffix}")


def capture_progress() -> Callable[[int, int, str], None]:
    """A display for `Bank.capture()`, on standard error; only of rank 0, and only on a terminal."""
    console = Console(stderr=True)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "{task.description}"
    is_silent = not console.is_terminal or rank() != 0
    bar = Progress("capturing graphs", *columns, console=console, transient=True, disable=is_silent)
    task = bar.add_task("")

    def show(done: int, total: int, label: str) -> None:
        if done == 0:
            bar.reset(task)
        bar.update(task, completed=done, total=total, description=label)
        bar.start()
        if done == total:
            bar.stop()

    return show
