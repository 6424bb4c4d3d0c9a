# SPDX-License-Identifier: Apache-2.0
"""What a run did, for people and for programs: counters to a table, to JSON, to TensorBoard scalars.

Counts nothing itself. A model's report is the plain dictionary that the Megatron floor makes.
"""

import errno
import json
import os
import platform
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import megagraph
from megagraph.log import rank
from megagraph.timeline import Lease

__all__ = [
    *(
        "capture_progress",
        "check_target",
        "is_replaced_by",
        "path_of_report",
        "path_of_stage",
        "read_leases",
        "read_report",
    ),
    *("STANDARD_OUTPUT", "report_table", "report_text", "scalars", "versions", "write_report"),
]

ModelReport = Mapping[str, Any]

STANDARD_OUTPUT = Path("-")
FORMAT = 2  # of the document; the first one did not say its own
# Further than any clock has run.
_FAR_MS = 1e15


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_capacity(value: object) -> bool:
    return isinstance(value, dict) and all(_is_count(value.get(key)) for key in ("tokens", "num_seqs"))


# What each key must hold: in words, and as a check.
_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": ("a string", lambda value: isinstance(value, str)),
    "calls": ("a count", _is_count),
    "replays": ("a count", _is_count),
    "eager": ("counts by reason", lambda it: isinstance(it, dict) and all(map(_is_count, it.values()))),
    "capacities": (
        "a list with tokens and num_seqs of each",
        lambda it: isinstance(it, list) and all(map(_is_capacity, it)),
    ),
    "capture_seconds": ("a number", _is_number),
    "padding_share": ("a number or null", lambda value: value is None or _is_number(value)),
}


def report_table(reports: Sequence[ModelReport]) -> Table:
    """One column for each model: calls, replays, eager calls by reason, padding, capture."""
    # As Text: failures hold foreign words, and rich takes those in brackets for its markup.
    table = Table(title="megagraph", show_lines=False)
    table.add_column("")
    for report in reports:
        table.add_column(Text(str(report["model"])), justify="right")
    for label, cell in _rows(reports):
        table.add_row(Text(label), *(Text(cell(report)) for report in reports))
    return table


def _rows(reports: Sequence[ModelReport]) -> Iterator[tuple[str, Callable[[ModelReport], str]]]:
    """What each row says, and of a report."""
    yield "layer calls", lambda it: f"{it['calls']:,}"
    yield "  replayed", lambda it: _share(it["replays"], it["calls"])
    for reason in dict.fromkeys(reason for report in reports for reason in report["eager"]):
        yield f"  eager: {reason}", partial(_eager, reason)
    yield "padding share of replays", lambda it: _percent(it["padding_share"])
    yield "capture", lambda it: f"{it['capture_seconds']:.2f} s"
    yield "capacities", lambda it: "\n".join(map(_capacity, it["capacities"])) or "-"
    if any(report.get("cuda_graph_modules") for report in reports):
        yield "graphed of each layer", lambda it: ", ".join(it.get("cuda_graph_modules", [])) or "all"
    if any(report.get("sites", report.get("layers")) != report.get("layers") for report in reports):
        yield "layers", lambda it: str(it.get("layers", "-"))
        yield "sites of them", lambda it: str(it.get("sites", "-"))
    if any(report.get("slots", 1) > 1 for report in reports):
        yield "slots", lambda it: str(it.get("slots", "-"))
        yield "most in flight", lambda it: str(it.get("most_in_flight", "-"))
    if any(report.get("cp_sizes") for report in reports):
        yield "micro-batches by ranks", lambda it: _of_sizes(it.get("cp_sizes", {})) or "-"
    if any(report.get("failures") for report in reports):
        yield "stays eager", lambda it: "\n".join(it.get("failures", []))
    if any(map(_unverified, reports)):
        yield "not verified", lambda it: "\n".join(_unverified(it))


def _eager(reason: str, report: ModelReport) -> str:
    return _share(report["eager"].get(reason, 0), report["calls"])


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else "0"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _capacity(capacity: Mapping[str, int]) -> str:
    ranks = f", {capacity['cp_size']} ranks" if "cp_size" in capacity else ""
    return f"{capacity['tokens']} tokens, {capacity['num_seqs']} documents{ranks}"


def _unverified(report: ModelReport) -> list[str]:
    """The sites whose graphs are used without having been compared, a line for each variant and cause."""
    found: dict[str, list[str]] = {}
    for it in report.get("verification", {}).get("unverified_sites", []):
        found.setdefault(f" ({it['variant']}): {it['why']}", []).append(it["site"])
    more = {why: f" and {len(sites) - 1} more" if len(sites) > 1 else "" for why, sites in found.items()}
    return [f"{sites[0]}{more[why]}{why}" for why, sites in found.items()]


def _of_sizes(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Micro-batches by the ranks that share them, a line each."""
    return "\n".join(
        f"{size}: {', '.join(f'{count:,} {what}' for what, count in of_size.items())}"
        for size, of_size in counts.items()
    )


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
    counts = {what: report[what] for what in ("calls", "replays", "capture_seconds", "replayed_rows")}
    counts["padding_rows"] = round(report["replayed_rows"] * (report["padding_share"] or 0.0))
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
    if path.is_dir():
        raise ValueError(f"{option}: expected a file, {path} is a folder")
    place = path
    try:
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
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
    except FileNotFoundError:
        pass
    return Path(os.path.realpath(path))


def _is_standard_output(path: Path) -> bool:
    """Also by another name, as `/dev/stdout`: if a shell has a file for it, no draft may replace that."""
    try:
        return path == STANDARD_OUTPUT or os.path.samestat(path.stat(), os.fstat(1))
    except OSError:  # it is closed, or nothing is there
        return False


def is_replaced_by(path: Path) -> bool:
    """Whether `write_report()` puts a new file in the place of this path, and writes into nothing."""
    return not _is_standard_output(path) and _file_behind(path) is not None


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


def read_report(path: Path) -> list[dict[str, Any]]:
    """Reads what `write_report()` wrote, of all stages of a pipeline as far as their files are there.

    Raises:
        ValueError: naming the file, what was expected and what it holds.
    """
    return [model for document in _documents(path).values() for model in document["models"]]


def read_leases(path: Path) -> dict[str, list[Lease]]:
    """When slots were leased in the run that left a report, of all stages as far as their files are there.

    Raises:
        ValueError: naming the file, what was expected and what it holds.
    """
    found: dict[str, list[Lease]] = {}
    for each, document in _documents(path).items():
        leases = document.get("leases", {})
        if not isinstance(leases, dict):
            raise ValueError(f"{each}: leases: expected an object, got {leases!r}")
        for name, some in leases.items():
            wrong = [it for it in some if not _is_lease(it)] if isinstance(some, list) else [some]
            if wrong:
                expected = "lists of a slot, whether it was for training, begin and end in ms or null"
                raise ValueError(f"{each}: leases.{name}: expected {expected}, got {wrong[0]!r}")
            found[name] = [Lease(*it) for it in some]
    return found


def _is_lease(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != len(Lease._fields):
        return False
    slot, grad, begin, end = value
    end = begin if end is None else end
    # JSON has NaN, Infinity and integers of any length, too.
    are_moments = all(_is_number(it) and abs(it) < _FAR_MS for it in (begin, end))
    return _is_count(slot) and isinstance(grad, bool) and are_moments and bool(begin <= end)


def _documents(path: Path) -> dict[Path, dict[str, Any]]:
    """A report, and those of further stages that lie beside it, by their files."""
    found = {path: _read(path)}
    stages = found[path].get("stages", 1)
    further = (path_of_stage(path, stage) for stage in range(1, stages if _is_count(stages) else 1))
    return found | {each: _read(each) for each in further if each.exists()}


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON or UTF-8
        raise ValueError(f"{path}: expected JSON, {error}") from error
    if isinstance(document, dict) and document.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT} of a report, got {document['format']!r}")
    models = document.get("models") if isinstance(document, dict) else None
    if not isinstance(models, list):
        raise ValueError(f"{path}: expected an object with a list 'models', as a run of megagraph leaves it")
    for index, model in enumerate(models):
        where = f"{path}: models[{index}]"
        if missing := [key for key in _EXPECTED if not isinstance(model, dict) or key not in model]:
            raise ValueError(f"{where}: expected the keys {', '.join(_EXPECTED)}, no {missing[0]}")
        for key, (expected, is_right) in _EXPECTED.items():
            if not is_right(model[key]):
                raise ValueError(f"{where}.{key}: expected {expected}, got {model[key]!r}")
    return document


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
