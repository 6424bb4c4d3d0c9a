# SPDX-License-Identifier: Apache-2.0
"""Figures of timings, beside rivals that may have failed; prints them, and writes and reads NAME.json."""

import contextlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, replace
from importlib import metadata
from operator import sub, truediv
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from benchmarks.measuring.children import Answer, described
from benchmarks.measuring.clocks import MIB

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = Path(os.environ.get("OUT", RESULTS))  # to which results are written
Times = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number, beside its bar and its rival where it has them; all numbers are in `unit`."""

    name: str  # what was measured, e.g. `host time of a graphed layer, forward`
    value: float  # of repeated timings their median
    unit: str
    bar: float | None = None  # the value to reach
    holds: bool | None = None  # whether it does; by default, as `better` has it
    rival: str | None = None  # what else was timed in the same run
    rival_value: float | None = None
    floor: float | None = None  # the best that anything could reach here
    p10: float | None = None  # 10th percentile of repeated timings
    p90: float | None = None
    better: InitVar[Literal["lower", "higher"]] = "lower"

    def __post_init__(self, better: str) -> None:
        for key in ("value", "bar", "rival_value", "floor", "p10", "p90"):
            number = getattr(self, key)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"figure {self.name!r}, key {key!r}: expected a finite number, got {number}")
        if self.rival is None and self.rival_value is not None:
            raise ValueError(f"figure {self.name!r}: expected who measured {self.rival_value}, got no rival")
        if self.holds is None and self.bar is not None:
            holds = self.value <= self.bar if better == "lower" else self.value >= self.bar
            object.__setattr__(self, "holds", holds)


def timed(name: str, times: Times, unit: str, *, value: float | None = None, **more: Any) -> Figure:
    """A figure of repeated timings: their median, or `value`, and the 10th and the 90th percentile."""
    low, *_, high = quantiles(times, n=10, method="inclusive")
    value = median(times) if value is None else value
    return Figure(name=name, value=value, unit=unit, p10=low, p90=high, **more)


def timed_ratio(name: str, above: Times, below: Times, unit: str, **more: Any) -> Figure:
    """The ratio of two medians, with the percentiles of the ratios of the pairs."""
    value = median(above) / median(below)
    return timed(name, ratios(above, below), unit, value=value, **more)


def in_mib(name: str, num_bytes: float) -> Figure:
    return Figure(name=name, value=num_bytes / MIB, unit="MiB")


def against(figure: Figure, rival: str, its: float | Times, *, share: float | None = None) -> Figure:
    """A figure beside a rival's value, or the median of its times; with a `share`, its bar is that of it.

    As a figure in MiB takes bytes, so does its rival.
    """
    its = (median(its) if isinstance(its, Sequence) else its) / (MIB if figure.unit == "MiB" else 1)
    return replace(figure, rival=rival, rival_value=its, bar=figure.bar if share is None else share * its)


def ratios(above: Times, below: Times) -> list[float]:
    """Of paired samples. Raises `ValueError` if there are not as many of one as of the other."""
    return [truediv(*pair) for pair in zip(above, below, strict=True)]


def differences(more: Times, less: Times) -> list[float]:
    """As `ratios()`."""
    return [sub(*pair) for pair in zip(more, less, strict=True)]


def beside_each(
    figure: Figure, rivals: Mapping[str, Answer], key: str, *, share: float | None = None
) -> list[Figure]:
    """One figure against what each rival answers of a key, or beside why that has none.

    The bar, which is one, stands on the first.
    """
    rows = []
    for rival, answer in rivals.items():
        if "error" in answer:
            rows.append(replace(figure, rival=f"{rival}: {answer['error']}"))
        else:
            rows.append(against(figure, rival, answer[key], share=share))
        figure, share = replace(figure, bar=None, holds=None), None
    return rows


def describe_environment() -> dict[str, str | None]:
    """Describes the running process, in the order of the file's keys.

    The commit ends in `-dirty` where files other than results differ from it; without a checkout it is that
    of `MEGAGRAPH_COMMIT`. Imports neither megatron-core nor Transformer Engine.
    """
    on_gpu = torch.cuda.is_available()
    drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None
    return {
        "commit": _git_commit() or os.environ.get("MEGAGRAPH_COMMIT") or None,
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "driver": (drivers or "").partition("\n")[0].strip() or None,
        "torch": str(torch.__version__),
        "megatron_core": _version("megatron.core", "megatron-core"),
        "transformer_engine": _version("transformer_engine", "transformer-engine-torch"),
        "command": _command(),
    }


def _output(*command: str) -> str | None:
    """The standard output of a command; None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _git_commit() -> str | None:
    git = ("git", "-C", str(ROOT))
    top = _output(*git, "rev-parse", "--show-toplevel")
    # A copy may lie inside the checkout of another project.
    if top is None or Path(top).resolve() != ROOT:
        return None
    commit = _output(*git, "rev-parse", "--verify", "HEAD")
    # The first result that a run writes must not taint the second.
    changes = _output(*git, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return f"{commit}-dirty" if commit and changes else commit


def _version(module: str, distribution: str) -> str | None:
    """Of the module where it is imported, else of what is installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return str(getattr(sys.modules.get(module), "__version__", None) or metadata.version(distribution))
    return None


def _command() -> str:
    """What reproduces the result."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = None if spec is None else str(spec.name).removesuffix(".__main__")
    program = ["python", "-m", module] if module else [Path(sys.argv[0]).name]
    return shlex.join([*program, *sys.argv[1:]])


def write_result(path: Path, figures: Sequence[Figure]) -> None:
    """Writes figures of this process as JSON; a reader sees the old file or the whole new one."""
    records = [*map(asdict, figures)]
    for once in (it for it in records if it["p10"] is None):
        del once["p10"], once["p90"]
    record = {**describe_environment(), "figures": records}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(draft, path)


def read_figures(path: Path) -> tuple[Figure, ...]:
    """Of a result. Raises `ValueError`, naming the file, where it is none."""
    try:
        return tuple(Figure(**it) for it in json.loads(path.read_text(encoding="utf-8"))["figures"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def show(title: str, figures: Sequence[Figure]) -> None:
    """Prints ours, its spread, the rival, their ratio and the floor as Markdown, a line for each figure."""
    columns = ("figure", "ours", "10 - 90 %", "unit", "bar", "rival", "its", "ours / its", "floor")
    table = Table(*columns, title=title, box=MARKDOWN)
    for figure in figures:
        rival = figure.rival_value
        table.add_row(
            figure.name,
            f"{figure.value:.4g}",
            "" if figure.p10 is None else f"{figure.p10:.3g} - {figure.p90:.3g}",
            figure.unit,
            "" if figure.bar is None else f"{figure.bar:.4g} {'holds' if figure.holds else 'MISSED'}",
            figure.rival or "",
            "" if rival is None else f"{rival:.4g}",
            "" if not rival else f"{figure.value / rival:.3g}",
            "" if figure.floor is None else f"{figure.floor:.4g}",
        )
    Console(width=None if os.environ.get("COLUMNS") else 200).print(table)


def publish(path: Path, figures: Sequence[Figure]) -> None:
    """Prints the figures and writes them to `path`."""
    show(path.stem, figures)
    write_result(path, figures)
    print(f"wrote {path}", flush=True)


def measure(path: Path, parts: Mapping[str, Callable[[], Iterable[Figure]]]) -> None:
    """Measures the parts of a benchmark, and publishes what there is.

    What a part found is written at once, however the rest fares. Raises `RuntimeError` if a part has failed,
    naming each.
    """
    figures: list[Figure] = []
    failures = []
    for what, part in parts.items():
        try:
            figures += part()
            write_result(path, figures)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            failures.append(f"{what}: {described(error)}")
    if figures:
        publish(path, figures)
    if failures:
        raise RuntimeError("; ".join(failures))
