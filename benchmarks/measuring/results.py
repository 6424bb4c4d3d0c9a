# SPDX-License-Identifier: Apache-2.0
"""The format of measured figures, benchmarks/results/NAME.json: writes and reads it, measures nothing."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

# Which types JSON may give for each key; bool is none of the numbers.
Kinds = Mapping[str, tuple[type, ...]]
Better = Literal["lower", "higher"]
_NONE = type(None)
_NUMBER, _NUMBER_OR_NONE, _TEXT_OR_NONE = (int, float), (int, float, _NONE), (str, _NONE)
_ENVIRONMENT: Kinds = {
    **{"commit": _TEXT_OR_NONE, "device": (str,), "driver": _TEXT_OR_NONE, "torch": (str,)},
    **{"megatron_core": _TEXT_OR_NONE, "transformer_engine": _TEXT_OR_NONE, "command": (str,)},
}
_FIGURE: Kinds = {
    **{"name": (str,), "value": _NUMBER, "unit": (str,), "bar": _NUMBER_OR_NONE, "holds": (bool, _NONE)},
    **{"rival": _TEXT_OR_NONE, "rival_value": _NUMBER_OR_NONE, "floor": _NUMBER_OR_NONE},
}
_SPREAD: Kinds = {"p10": _NUMBER, "p90": _NUMBER}
_COUNTS: Kinds = dict.fromkeys(("steps", "calls", "replays"), (int,))
_COMPARISON: Kinds = {"bitwise_equal": (bool,), **_COUNTS, "eager": (dict,)}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number, beside its bar and its rival where it has them; all numbers are in `unit`."""

    name: str  # what was measured, e.g. `host time of a graphed layer, forward`
    value: float  # of repeated timings their median
    unit: str
    bar: float | None = None  # the value to reach
    better: Better = field(default="lower", compare=False)  # not stored: `holds` tells it
    rival: str | None = None  # what else was timed in the same run
    rival_value: float | None = None
    floor: float | None = None  # the best that anything could reach here
    p10: float | None = None  # 10th percentile of the timings; older files have none
    p90: float | None = None

    def __post_init__(self) -> None:
        for key in ("value", "bar", "rival_value", "floor", "p10", "p90"):
            number = getattr(self, key)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"figure {self.name!r}, key {key!r}: expected a finite number, got {number}")
        if self.rival is None and self.rival_value is not None:
            raise ValueError(f"figure {self.name!r}: expected who measured {self.rival_value}, got no rival")

    @property
    def holds(self) -> bool | None:
        """Whether the value reaches its bar; None without a bar."""
        if self.bar is None:
            return None
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How graph and eager compared: whether every bit was equal, in how many steps, and what replayed."""

    bitwise_equal: bool
    steps: int
    calls: int
    replays: int
    eager: dict[str, int]

    def __post_init__(self) -> None:
        counted = self.replays + sum(self.eager.values())
        if counted != self.calls or min(self.steps, self.replays, *self.eager.values(), 0) < 0:
            raise ValueError(f"expected replays + eager = {counted} calls, none of them negative, got {self}")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one command measured, and where; `environment` is what `describe_environment()` answers."""

    environment: dict[str, str | None]
    figures: tuple[Figure, ...]
    comparison: Comparison | None = None


def write_result(path: Path, result: Result) -> None:
    """Writes JSON; a reader sees the old file or the whole new one."""
    figures = [
        {key: of for key in (*_FIGURE, *_SPREAD) if (of := getattr(each, key)) is not None or key in _FIGURE}
        for each in result.figures
    ]
    record: dict[str, Any] = {**result.environment, "figures": figures}
    if result.comparison is not None:
        record |= dataclasses.asdict(result.comparison)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(draft, path)


def read_result(path: Path) -> Result:
    """Reads a result. Raises `ValueError`, naming the file, the key, what was expected and got."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        compared = isinstance(record, dict) and not record.keys().isdisjoint(_COMPARISON)
        if isinstance(record, dict):
            record.setdefault("transformer_engine", None)  # older files lack it
        _check(record, {**_ENVIRONMENT, "figures": (list,), **(_COMPARISON if compared else {})}, "the file")
        figures = tuple(_figure_of(each, f"figures[{i}]") for i, each in enumerate(record["figures"]))
        if compared:
            _check(record["eager"], dict.fromkeys(record["eager"], (int,)), "eager")
        comparison = Comparison(**{key: record[key] for key in _COMPARISON}) if compared else None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    environment = {key: record[key] for key in _ENVIRONMENT}
    return Result(environment=environment, figures=figures, comparison=comparison)


def _figure_of(record: Any, where: str) -> Figure:
    _check(record, _FIGURE, where, optional=_SPREAD)
    holds, bar, value = record["holds"], record["bar"], record["value"]
    if (holds is None) != (bar is None) or (value == bar and not holds):
        raise ValueError(f"{where}: expected `holds` to say whether {value} reaches {bar}, got {holds}")
    better: Better = "lower" if bar is None or (value <= bar) == holds else "higher"
    return Figure(**{key: of for key, of in record.items() if key != "holds"}, better=better)


def _check(record: Any, kinds: Kinds, where: str, optional: Kinds = MappingProxyType({})) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object, got {str(record)[:80]}")
    known = {**kinds, **optional}
    if missing := kinds.keys() - record.keys():
        raise ValueError(f"{where}: expected keys {sorted(missing)}, got none")
    if more := record.keys() - known.keys():
        raise ValueError(f"{where}: expected only keys {', '.join(known)}, got {sorted(more)}")
    for key, value in record.items():
        if type(value) not in known[key]:
            kind = " or ".join(kind.__name__ for kind in known[key])
            raise ValueError(f"{where}, key {key!r}: expected {kind}, got {value!r}")
