# SPDX-License-Identifier: Apache-2.0
"""Every option of the plugin, and the only reader of MEGAGRAPH_* variables.

Names are Megatron's where Megatron has one. Changes nothing by itself.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagraph.decide.dispatch import Capacity
from megagraph.packs.packing import TailConvention

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["GraphConfig"]

MODES = ("graph", "eager", "off")
_PREFIX = "MEGAGRAPH_"
_NOT_BUILT_MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """How to graph a model.

    Args:
        mode: `graph`; `eager`, canonical packs and our modules without graphs, the reference of
            every bitwise claim; `off`, nothing is patched.
        cuda_graph_max_packed_seqs: documents that a pack may hold, one capacity for each entry.
        max_seqlen_per_dp_cp_rank: physical tokens of one rank's share, of every capacity.
        max_seqlen: tokens of the longest document; by default all tokens of a pack.
        capacities: the bank of capacities outright, in place of the three above. Where neither is
            given, capacities are learned from the warm-up steps.
        cuda_graph_warmup_steps: eager training steps before the capture, at least 1.
        cuda_graph_modules: scopes inside a layer; empty for whole layers.
        cuda_graph_granularity: `layer`.
        tail: what canonical offsets say of the rows past a pack's end.
        progress: show a progress bar while capturing.
        poison: fill freed slots with NaN, to find late readers. Always on without a GPU.
        report: JSON file that the run leaves, or None.
        log_interval: training steps between two lines of the log that say what was replayed and what ran
            eager; 0 for none.
        cuda_graph_nvtx: name each replay for profilers: site, variant and slot, as a range of torch's
            profiler and as an NVTX range.
    """

    mode: str = "graph"
    cuda_graph_max_packed_seqs: tuple[int, ...] = ()
    max_seqlen_per_dp_cp_rank: int | None = None
    max_seqlen: int | None = None
    capacities: tuple[Capacity, ...] = ()
    cuda_graph_warmup_steps: int = 3
    cuda_graph_modules: tuple[str, ...] = ()
    cuda_graph_granularity: str = "layer"
    tail: TailConvention = TailConvention.HIDDEN
    progress: bool = True
    poison: bool = False
    report: Path | None = None
    log_interval: int = 100
    cuda_graph_nvtx: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {self.mode!r}")
        if self.cuda_graph_warmup_steps < 1:
            raise ValueError(
                f"cuda_graph_warmup_steps: expected at least 1, got {self.cuda_graph_warmup_steps}"
            )
        if self.cuda_graph_granularity != "layer":
            raise ValueError(
                f"cuda_graph_granularity: only 'layer' is built, got {self.cuda_graph_granularity!r}"
            )
        if self.log_interval < 0:
            raise ValueError(f"log_interval: expected at least 0, got {self.log_interval}")
        for scope in self.cuda_graph_modules:
            known = "is not built yet" if scope in _NOT_BUILT_MODULES else "is no scope of Megatron's"
            raise ValueError(f"cuda_graph_modules: expected none (whole layers), {scope!r} {known}")
        self._check_capacities()

    def _check_capacities(self) -> None:
        counts, tokens = self.cuda_graph_max_packed_seqs, self.max_seqlen_per_dp_cp_rank
        if self.capacities and (counts or tokens is not None or self.max_seqlen is not None):
            raise ValueError(
                "capacities: expected either this or cuda_graph_max_packed_seqs with "
                "max_seqlen_per_dp_cp_rank, got both"
            )
        if bool(counts) != (tokens is not None):
            raise ValueError(
                "cuda_graph_max_packed_seqs and max_seqlen_per_dp_cp_rank: expected both or neither, got "
                f"{self.cuda_graph_max_packed_seqs or None} and {self.max_seqlen_per_dp_cp_rank}"
            )
        if self.max_seqlen is not None and not counts:
            raise ValueError("max_seqlen: expected together with cuda_graph_max_packed_seqs")
        for capacity in self.all_capacities():
            if self.tail is not TailConvention.HIDDEN and capacity.max_seqlen < capacity.tokens:
                raise ValueError(
                    f"tail: {self.tail.value!r} makes documents as long as the tail, which needs a "
                    f"max_seqlen of {capacity.tokens}, got {capacity.max_seqlen}"
                )

    def all_capacities(self, cp_size: int = 1) -> tuple[Capacity, ...]:
        """The configured bank of capacities, smallest first; empty where it is to be learned."""
        if self.capacities:
            return tuple(sorted(self.capacities))
        tokens = self.max_seqlen_per_dp_cp_rank
        return tuple(
            Capacity(
                tokens=tokens,
                num_seqs=num_seqs,
                max_seqlen=tokens * cp_size if self.max_seqlen is None else self.max_seqlen,
            )
            for num_seqs in sorted(set(self.cuda_graph_max_packed_seqs))
            if tokens is not None
        )

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], *, source: str, base: "GraphConfig | None" = None
    ) -> "GraphConfig":
        """Builds a config from named values, as TOML or the environment spell them.

        Args:
            values: the documented keys; `cuda_graph_scope` is taken as `cuda_graph_modules`.
            source: named in errors.
            base: what the values go before; by default the defaults.

        Raises:
            ValueError: for an unknown key or a value of the wrong kind, naming both and the source.
        """
        values = dict(values)
        if "cuda_graph_scope" in values:
            if "cuda_graph_modules" in values:
                raise ValueError(f"{source}: expected cuda_graph_modules or cuda_graph_scope, got both")
            values["cuda_graph_modules"] = values.pop("cuda_graph_scope")
        known = {field.name for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ValueError(f"{source}: {key!r} is no option; there are {', '.join(sorted(known))}")
        try:
            parsed = {key: _parse(key, value) for key, value in values.items()}
            if base is None:
                return cls(**parsed)
            # One way of naming capacities takes the place of the other.
            if "capacities" in parsed:
                parsed = {**dict.fromkeys(_SHORT_FORM), "cuda_graph_max_packed_seqs": (), **parsed}
            elif any(key in parsed for key in _SHORT_FORM):
                parsed = {"capacities": (), **parsed}
            return dataclasses.replace(base, **parsed)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}: {error}") from error

    @classmethod
    def from_toml(cls, path: Path) -> "GraphConfig":
        """Reads the table `[megagraph]` of a TOML file; other tables are left alone."""
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: expected TOML, {error}") from error
        if not isinstance(document.get("megagraph"), dict):
            raise ValueError(f"{path}: expected a table [megagraph], found {', '.join(document) or 'none'}")
        return cls.from_mapping(document["megagraph"], source=str(path))

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] = os.environ, base: "GraphConfig | None" = None
    ) -> "GraphConfig":
        """Reads MEGAGRAPH_<OPTION IN CAPITALS>; what is set there goes before `base`."""
        values = {
            name.removeprefix(_PREFIX).lower(): value
            for name, value in environ.items()
            if name.startswith(_PREFIX) and name not in _NOT_OPTIONS
        }
        return cls.from_mapping(values, source="environment", base=base)


_SHORT_FORM = ("cuda_graph_max_packed_seqs", "max_seqlen_per_dp_cp_rank", "max_seqlen")
# Variables with our prefix that other parts of the project own: its build, tests and recorded results.
_NOT_OPTIONS = frozenset(
    {"MEGAGRAPH_COMMIT", "MEGAGRAPH_CPU_ONLY", "MEGAGRAPH_TEST_CORE", "MEGAGRAPH_WERROR"}
)


def _parse(option: str, value: Any) -> Any:
    try:
        return _PARSERS[option](value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{option}: {error}") from error


def _path(value: Any) -> Path | None:
    if not isinstance(value, str | Path):
        raise TypeError(f"expected a path, got {value!r}")
    return Path(value) if str(value) else None


def _split(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"expected an integer, got {value!r}")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"expected an integer, got {value!r}") from None


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    if str(value).lower() not in words:
        raise ValueError(f"expected true or false, got {value!r}")
    return words[str(value).lower()]


def _capacity(value: Any) -> Capacity:
    """From a table, or from `tokens:num_seqs[:max_seqlen]`."""
    if isinstance(value, Capacity):
        return value
    if isinstance(value, Mapping):
        return Capacity(**value)
    parts = [_integer(part) for part in str(value).split(":")]
    if len(parts) not in (2, 3):
        raise ValueError(f"expected tokens:num_seqs[:max_seqlen], got {value!r}")
    return Capacity(tokens=parts[0], num_seqs=parts[1], max_seqlen=parts[-1] if len(parts) == 3 else parts[0])


def _tail(value: Any) -> TailConvention:
    names = [convention.value for convention in TailConvention]
    if isinstance(value, TailConvention):
        return value
    if value not in names:
        raise ValueError(f"expected one of {', '.join(names)}, got {value!r}")
    return TailConvention(value)


_PARSERS: dict[str, Any] = {
    "mode": str,
    "cuda_graph_max_packed_seqs": lambda value: tuple(_integer(part) for part in _split(value)),
    "max_seqlen_per_dp_cp_rank": _integer,
    "max_seqlen": _integer,
    "capacities": lambda value: tuple(_capacity(part) for part in _split(value)),
    "cuda_graph_warmup_steps": _integer,
    "cuda_graph_modules": lambda value: tuple(str(part) for part in _split(value)),
    "cuda_graph_granularity": str,
    "tail": _tail,
    "progress": _boolean,
    "poison": _boolean,
    "report": _path,
    "log_interval": _integer,
    "cuda_graph_nvtx": _boolean,
}
