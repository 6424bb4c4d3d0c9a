# SPDX-License-Identifier: Apache-2.0
"""The one format of measured results: `benchmarks/results/NAME.json`.

A result names the code, the machine and the command that produced its figures. It does not measure
anything, and nothing in megagraph but the command line imports it.
"""

import contextlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

__all__ = ["Comparison", "Environment", "Figure", "Result", "describe_environment"]

ROOT = Path(__file__).resolve().parent.parent

_ENVIRONMENT_KEYS = ("commit", "device", "driver", "torch", "megatron_core", "transformer_engine", "command")
_FIGURE_KEYS = ("name", "value", "unit", "bar", "holds", "rival", "rival_value", "floor")
_COMPARISON_KEYS = ("bitwise_equal", "steps", "calls", "replays", "eager")
_KIND_NAMES: dict[type, str] = {
    str: "a string",
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a result comes from. It does not hold settings: those are in `command`.

    Args:
        commit: the commit measured, with `-dirty` where tracked or new files differed; None if unknown.
        device: the GPU's name, or the CPU's where there is no GPU.
        driver: the NVIDIA driver's version; None on a CPU.
        torch: torch's version.
        megatron_core: megatron-core's version; None where it is not installed.
        transformer_engine: its version; None where it is not installed, and in older files.
        command: the command line, program name without folders.
    """

    commit: str | None
    device: str
    driver: str | None
    torch: str
    megatron_core: str | None
    transformer_engine: str | None = None
    command: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number, beside its bar and its rival where it has them.

    Args:
        name: what was measured, e.g. `host time of a graphed layer, forward`.
        value: the number, in `unit`.
        unit: e.g. `us`, `GB/s`, `ratio`.
        bar: the value to reach, in `unit`.
        better: whether a `lower` or a `higher` value is better. Not stored: `holds` tells it.
        rival: what else was timed in the same run.
        rival_value: the rival's number, in `unit`.
        floor: the best that anything could reach here, in `unit`.

    Raises:
        ValueError: if a number is not finite, or `rival_value` comes without `rival`.
    """

    name: str
    value: float
    unit: str
    bar: float | None = None
    better: Literal["lower", "higher"] = field(default="lower", compare=False)
    rival: str | None = None
    rival_value: float | None = None
    floor: float | None = None

    def __post_init__(self) -> None:
        for key in ("value", "bar", "rival_value", "floor"):
            number = getattr(self, key)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"figure {self.name!r}, key {key!r}: expected a finite number, got {number}")
        if self.better not in ("lower", "higher"):
            raise ValueError(
                f"figure {self.name!r}: expected better='lower' or 'higher', got {self.better!r}"
            )
        if self.rival is None and self.rival_value is not None:
            raise ValueError(
                f"figure {self.name!r}, key 'rival': expected what measured {self.rival_value}, got None"
            )

    @property
    def holds(self) -> bool | None:
        """Whether the value reaches its bar; None without a bar."""
        if self.bar is None:
            return None
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How graph and eager compared over whole training steps.

    Args:
        bitwise_equal: every output, loss and gradient had the same bits.
        steps: training steps compared.
        calls: patched calls in them.
        replays: calls that replayed a graph.
        eager: calls that ran eager, by reason.

    Raises:
        ValueError: if a count is negative, or the counts do not add up to `calls`.
    """

    bitwise_equal: bool
    steps: int
    calls: int
    replays: int
    eager: Mapping[str, int]

    def __post_init__(self) -> None:
        counts = {"steps": self.steps, "calls": self.calls, "replays": self.replays, **self.eager}
        for key, count in counts.items():
            if count < 0:
                raise ValueError(f"comparison, key {key!r}: expected a count, got {count}")
        counted = self.replays + sum(self.eager.values())
        if counted != self.calls:
            raise ValueError(
                f"comparison, key 'calls': expected replays + eager = {counted} calls, got {self.calls}"
            )


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one command measured. It does not merge: a command run again replaces its file.

    Args:
        environment: where the figures come from.
        figures: the figures, in the order of the table they were printed in.
        comparison: graph against eager, where they were compared.
    """

    environment: Environment
    figures: tuple[Figure, ...]
    comparison: Comparison | None = None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the result as JSON; a reader sees the old file or the whole new one.

        Args:
            path: the file; its folder is made where it is missing.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(self._record(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Result":
        """Reads and checks a result.

        Args:
            path: the file.

        Raises:
            ValueError: if the file is not a result; names the file, the key, what was expected and got.
        """
        try:
            return _parse(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    def _record(self) -> dict[str, Any]:
        record: dict[str, Any] = {key: getattr(self.environment, key) for key in _ENVIRONMENT_KEYS}
        record["figures"] = [{key: getattr(figure, key) for key in _FIGURE_KEYS} for figure in self.figures]
        if self.comparison is not None:
            record |= {key: getattr(self.comparison, key) for key in _COMPARISON_KEYS}
            record["eager"] = dict(self.comparison.eager)
        return record


def describe_environment() -> Environment:
    """Describes the running process. It imports neither megatron-core nor Transformer Engine.

    Returns:
        The environment. Without a git checkout the commit is that of `MEGAGRAPH_COMMIT`, else None.
    """
    on_gpu = torch.cuda.is_available()
    return Environment(
        commit=_git_commit() or os.environ.get("MEGAGRAPH_COMMIT") or None,
        device=torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        driver=_driver_version() if on_gpu else None,
        torch=str(torch.__version__),
        megatron_core=_version("megatron.core", "megatron-core"),
        transformer_engine=_version("transformer_engine", "transformer-engine", "transformer-engine-torch"),
        command=_command(),
    )


def _output(*command: str) -> str | None:
    """The standard output of a command; None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _git_commit() -> str | None:
    git = ("git", "-C", str(ROOT))
    top = _output(*git, "rev-parse", "--show-toplevel")
    # An installed copy may lie inside the checkout of another project.
    if top is None or Path(top).resolve() != ROOT:
        return None
    commit = _output(*git, "rev-parse", "--verify", "HEAD")
    # Results themselves do not count: the first one that a run writes must not taint the second.
    changes = _output(*git, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return f"{commit}-dirty" if commit and changes else commit


def _cpu_name() -> str:
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver_version() -> str | None:
    versions = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0].strip() if versions else None


def _version(module: str, *distributions: str) -> str | None:
    """Of the module where it is imported, else of the first distribution that is installed."""
    imported = getattr(sys.modules.get(module), "__version__", None)
    if imported is not None:
        return str(imported)
    for distribution in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = None if spec is None else str(spec.name).removesuffix(".__main__")
    program = ["python", "-m", module] if module else [Path(sys.argv[0]).name]
    return shlex.join([*program, *sys.argv[1:]])


def _parse(record: Any) -> Result:
    if not isinstance(record, dict):
        raise ValueError(f"key '(whole file)': expected an object, got {_shown(record)}")
    record = {"transformer_engine": None, **record}  # older files lack it
    compared = any(key in record for key in _COMPARISON_KEYS)
    _check_keys(record, (*_ENVIRONMENT_KEYS, "figures", *(_COMPARISON_KEYS if compared else ())))
    return Result(
        environment=Environment(
            commit=_take_or_none(record, "commit", str),
            device=_take(record, "device", str),
            driver=_take_or_none(record, "driver", str),
            torch=_take(record, "torch", str),
            megatron_core=_take_or_none(record, "megatron_core", str),
            transformer_engine=_take_or_none(record, "transformer_engine", str),
            command=_take(record, "command", str),
        ),
        figures=tuple(
            _parse_figure(figure, f"figures[{i}]") for i, figure in enumerate(_take(record, "figures", list))
        ),
        comparison=_parse_comparison(record) if compared else None,
    )


def _parse_figure(record: Any, where: str) -> Figure:
    if not isinstance(record, dict):
        raise ValueError(f"key {where!r}: expected an object, got {_shown(record)}")
    where += "."
    _check_keys(record, _FIGURE_KEYS, where)
    value, bar = _take(record, "value", float, where), _take_or_none(record, "bar", float, where)
    holds = None if bar is None else _take(record, "holds", bool, where)
    if record["holds"] is not holds or (value == bar and not holds):
        expected = "null without a bar" if bar is None else "true where value equals bar"
        raise ValueError(f"key {where + 'holds'!r}: expected {expected}, got {_shown(record['holds'])}")
    return Figure(
        name=_take(record, "name", str, where),
        value=value,
        unit=_take(record, "unit", str, where),
        bar=bar,
        better="lower" if bar is None or (value <= bar) == holds else "higher",
        rival=_take_or_none(record, "rival", str, where),
        rival_value=_take_or_none(record, "rival_value", float, where),
        floor=_take_or_none(record, "floor", float, where),
    )


def _parse_comparison(record: dict[str, Any]) -> Comparison:
    eager = _take(record, "eager", dict)
    return Comparison(
        bitwise_equal=_take(record, "bitwise_equal", bool),
        steps=_take(record, "steps", int),
        calls=_take(record, "calls", int),
        replays=_take(record, "replays", int),
        eager={reason: _take(eager, reason, int, "eager.") for reason in eager},
    )


def _check_keys(record: dict[str, Any], keys: tuple[str, ...], where: str = "") -> None:
    for key in keys:
        if key not in record:
            raise ValueError(f"key {where + key!r}: expected it to be there, got nothing")
    for key in record:
        if key not in keys:
            raise ValueError(f"key {where + key!r}: expected only {', '.join(keys)}, got it too")


def _take(record: dict[str, Any], key: str, kind: type[T], where: str = "") -> T:
    value = record[key]
    if kind is float and type(value) is int:
        value = float(value)
    # Exact, since True is also an int.
    if type(value) is not kind:
        raise ValueError(f"key {where + key!r}: expected {_KIND_NAMES[kind]}, got {_shown(value)}")
    return value


def _take_or_none(record: dict[str, Any], key: str, kind: type[T], where: str = "") -> T | None:
    return None if record[key] is None else _take(record, key, kind, where)


def _shown(value: object) -> str:
    return json.dumps(value)[:80]
