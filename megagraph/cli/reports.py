# SPDX-License-Identifier: Apache-2.0
"""`megagraph report FILE`: what a run has left, as a table, as JSON, or drawn: when slots were in use."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from megagraph.cli.ends import Screen, add_json, check_json, folded, write_json
from megagraph.reasons import verdict
from megagraph.report import FORMAT, ModelReport, path_of_stage

__all__ = ["Lease", "add_parser", "describe", "draw_timeline", "read_leases", "read_report", "report_table"]


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command."""
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
    parser.set_defaults(prepare=_prepare)


def _prepare(options: argparse.Namespace) -> Callable[[], int]:
    if not options.file.is_file():
        raise ValueError(f"expected the file of a report, {options.file} is no file")
    reports = read_report(options.file)
    shown: Any = report_table(reports)
    if options.timeline is not None:
        draw_timeline(read_leases(options.file), options.timeline)
        shown = f"wrote {options.timeline}"
    elif options.json is not None:
        for each in _documents(options.file):
            check_json(options.json, each)
        return partial(write_json, "report", options.json, reports, verdict=verdict(reports))
    return partial(_show, shown, verdict(reports))


def _show(shown: Any, said: str) -> int:
    if isinstance(shown, str):
        print(shown)
    else:
        Screen().print(shown)
        print(said)
    return 0


# -- reading -----------------------------------------------------------------------------------------


class Lease(NamedTuple):
    """A slot from the forward of a micro-batch until nobody held it any more."""

    slot: int
    grad: bool  # for training
    begin: float  # ms since 1970, as the end
    end: float | None  # None while it was held


_MOST_STAGES = 10_000  # for each of which a file is looked for
# Further than any clock has run.
_FAR_MS = 1e15


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _are_sites(value: object) -> bool:
    keys = {"site", "variant", "why"}
    return isinstance(value, list) and all(isinstance(it, dict) and keys <= it.keys() for it in value)


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
_TEXTS = ("a list of strings", lambda it: isinstance(it, list) and all(type(each) is str for each in it))
# The same of keys that may be missing.
_FURTHER: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("failures", "cuda_graph_modules"), _TEXTS),
    "slots": ("a count", _is_count),
    "most_needed": (
        "tokens, num_seqs and max_seqlen, or null",
        lambda it: it is None or (_is_capacity(it) and _is_count(it.get("max_seqlen", 0))),
    ),
    "cp_sizes": (
        "counts by size",
        lambda it: isinstance(it, dict) and all(_EXPECTED["eager"][1](each) for each in it.values()),
    ),
    "verification": (
        "an object with site, variant and why of each of unverified_sites",
        lambda it: isinstance(it, dict) and _are_sites(it.get("unverified_sites", [])),
    ),
}


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
    further = (path_of_stage(path, stage) for stage in range(1, found[path].get("stages", 1)))
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
    if not _is_count(stages := document.get("stages", 1)) or stages > _MOST_STAGES:
        raise ValueError(f"{path}: stages: expected a count of at most {_MOST_STAGES}, got {stages!r}")
    for index, model in enumerate(models):
        where = f"{path}: models[{index}]"
        if missing := [key for key in _EXPECTED if not isinstance(model, dict) or key not in model]:
            raise ValueError(f"{where}: expected the keys {', '.join(_EXPECTED)}, no {missing[0]}")
        for key, (expected, is_right) in {**_EXPECTED, **_FURTHER}.items():
            if key in model and not is_right(model[key]):
                raise ValueError(f"{where}.{key}: expected {expected}, got {model[key]!r}")
    return document


# -- the table ---------------------------------------------------------------------------------------


def report_table(reports: Sequence[ModelReport]) -> Table:
    """One column for each model: calls, replays, eager calls by reason, padding, capture."""
    # As Text: failures hold foreign words, and rich takes those in brackets for its markup.
    table = Table(title="megagraph", show_lines=False)
    table.add_column("")
    for report in reports:
        table.add_column(folded(str(report["model"])), justify="right")
    for label, cell in _rows(reports):
        table.add_row(folded(label), *(folded(cell(report)) for report in reports))
    return table


def _rows(reports: Sequence[ModelReport]) -> Iterator[tuple[str, Callable[[ModelReport], str]]]:
    """What each row says, and of a report."""
    yield "layer calls", lambda it: f"{it['calls']:,}"
    yield "  replayed", lambda it: _share(it["replays"], it["calls"])
    for reason in dict.fromkeys(reason for report in reports for reason in report["eager"]):
        yield f"  eager: {reason}", partial(_eager, reason)
    yield "padding share of replays", lambda it: _percent(it["padding_share"])
    yield "capture", lambda it: f"{it['capture_seconds']:.2f} s"
    yield "capacities", lambda it: "\n".join(map(describe, it["capacities"])) or "-"
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


def describe(capacity: Mapping[str, int]) -> str:
    """In words; with how many ranks share a pack, if they do."""
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


# -- when slots were in use --------------------------------------------------------------------------

# Of each chunk: more are thinner than a line.
_MOST_LEASES = 32
_COLOURS = {True: "#1b6ca8", False: "#d98324"}


def draw_timeline(leases: Mapping[str, Sequence[Lease]], path: Path) -> None:
    """Draws a line for each slot of each chunk, and on it a bar for each micro-batch that was in it.

    Raises:
        ValueError: if matplotlib is not installed; naming the path and the kinds of images, if its ending is
            none of them; if no chunk had several slots.
        OSError: if the image cannot be written.
    """
    shown = {name: list(some)[-_MOST_LEASES:] for name, some in leases.items() if some}
    if not shown:
        raise ValueError("no model chunk has had several slots, so that there is no timeline of them")
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"drawing needs matplotlib: pip install matplotlib ({error})") from error

    # What all chunks have recorded: one that runs more often has forgotten more.
    start = max(min(it.begin for it in some) for some in shown.values())
    # Until when one that has no end is drawn.
    latest = max(it.begin if it.end is None else it.end for some in shown.values() for it in some)
    slots = {name: sorted({it.slot for it in leases[name]}) for name in shown}
    lines: list[str] = []
    # A name is no formula.
    with style.context(["default", {"text.parse_math": False, "font.size": 9}]):
        # Not pyplot's: that keeps figures, and chooses a backend for the whole process.
        figure = Figure(figsize=(10, 1 + 0.25 * sum(map(len, slots.values()))), layout="constrained")
        kinds = sorted(figure.canvas.get_supported_filetypes())
        if path.suffix[1:].lower() not in kinds:
            raise ValueError(f"{path}: expected an image, whose name ends in one of {', '.join(kinds)}")
        axes = figure.subplots()
        for name, some in shown.items():
            for slot in slots[name]:
                for grad, colour in _COLOURS.items():
                    own = [it for it in some if it.slot == slot and it.grad is grad]
                    ends = [(max(it.begin, start), latest if it.end is None else it.end) for it in own]
                    bars = [(begin - start, end - begin) for begin, end in ends if end > begin]
                    axes.broken_barh(bars, (len(lines) - 0.4, 0.8), color=colour, edgecolor="white")
                lines.append(f"{name}, slot {slot}")
        axes.set_yticks(range(len(lines)), lines)
        axes.invert_yaxis()
        axes.set_xlabel("ms on the host; blue: training, orange: forward only")
        figure.savefig(path)
