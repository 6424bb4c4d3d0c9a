# SPDX-License-Identifier: Apache-2.0
"""What a run did, for people and for programs: counters to a table, to JSON, to TensorBoard scalars.

Counts nothing itself. A model's report is the plain dictionary that the Megatron floor makes.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

__all__ = ["read_report", "report_table", "scalars", "write_report"]

ModelReport = Mapping[str, Any]


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
    "eager": (
        "counts by reason",
        lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
    ),
    "capacities": (
        "a list with tokens and num_seqs of each",
        lambda value: isinstance(value, list) and all(map(_is_capacity, value)),
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
    for label, cells in _rows(reports):
        table.add_row(Text(label), *map(Text, cells))
    return table


def _rows(reports: Sequence[ModelReport]) -> list[tuple[str, list[str]]]:
    rows = [
        ("layer calls", [f"{report['calls']:,}" for report in reports]),
        ("  replayed", [_share(report["replays"], report["calls"]) for report in reports]),
    ]
    reasons = dict.fromkeys(reason for report in reports for reason in report["eager"])
    for reason in reasons:
        counts = [_share(report["eager"].get(reason, 0), report["calls"]) for report in reports]
        rows.append((f"  eager: {reason}", counts))
    rows.append(("padding share of replays", [_percent(report["padding_share"]) for report in reports]))
    rows.append(("capture", [f"{report['capture_seconds']:.2f} s" for report in reports]))
    rows.append(("capacities", ["\n".join(_capacity(c) for c in r["capacities"]) or "-" for r in reports]))
    failures = ["\n".join(report.get("failures", [])) for report in reports]
    if any(failures):
        rows.append(("stays eager", failures))
    return rows


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else "0"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _capacity(capacity: Mapping[str, int]) -> str:
    return f"{capacity['tokens']} tokens, {capacity['num_seqs']} documents"


def scalars(report: ModelReport) -> dict[str, float]:
    """The report's numbers by name, as TensorBoard's and W&B's writers take them."""
    values = {
        "megagraph/calls": float(report["calls"]),
        "megagraph/replays": float(report["replays"]),
        "megagraph/capture_seconds": float(report["capture_seconds"]),
    }
    if report["padding_share"] is not None:
        values["megagraph/padding_share"] = float(report["padding_share"])
    values.update({f"megagraph/eager/{reason}": float(n) for reason, n in report["eager"].items()})
    return values


def write_report(reports: Sequence[ModelReport], path: Path) -> None:
    """Writes the reports as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps({"models": list(reports)}, indent=2) + "\n", encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_report(path: Path) -> list[dict[str, Any]]:
    """Reads what `write_report()` wrote.

    Raises:
        ValueError: naming the file, what was expected and what it holds.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or UTF-8
        raise ValueError(f"{path}: expected JSON, {error}") from error
    models = document.get("models") if isinstance(document, dict) else None
    if not isinstance(models, list):
        raise ValueError(f"{path}: expected an object with a list 'models', as a run of megagraph leaves it")
    for index, model in enumerate(models):
        missing = [key for key in _EXPECTED if not isinstance(model, dict) or key not in model]
        if missing:
            raise ValueError(
                f"{path}: models[{index}]: expected the keys {', '.join(_EXPECTED)}, no {missing[0]}"
            )
        for key, (expected, is_right) in _EXPECTED.items():
            if not is_right(model[key]):
                raise ValueError(f"{path}: models[{index}].{key}: expected {expected}, got {model[key]!r}")
    return models
